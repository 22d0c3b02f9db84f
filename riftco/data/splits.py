"""Which records train, validate and test: assigned by a stable hash, and refused when splits overlap."""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, TypeVar

from artifacts import canonical_json
from riftco.data.instructions import InstructionExample, InstructionFormatter
from riftco.errors import InputError

Partition = Literal["train", "validation", "test"]
PARTITIONS: tuple[Partition, ...] = ("train", "validation", "test")

T = TypeVar("T")

_DOMAIN = b"riftco_transformer.stable_split.v1"


@dataclass(frozen=True, slots=True)
class SplitFractions:
    """Expected shares of the three partitions: finite, not negative, together 1 within 1e-12."""

    train: float = 0.8
    validation: float = 0.1
    test: float = 0.1

    def __post_init__(self) -> None:
        shares = (self.train, self.validation, self.test)
        if not all(math.isfinite(share) and share >= 0 for share in shares) or abs(sum(shares) - 1) > 1e-12:
            raise InputError(f"split fractions {shares} must be at least 0 and add up to 1; adjust them")


class StableHashSplitter:
    """Assigns a record to a partition by its content alone, so neither order nor other records matter."""

    def __init__(self, fractions: SplitFractions | None = None, seed: int | str = 7) -> None:
        self.fractions = fractions or SplitFractions()
        self.seed_label = _seed_label(seed)
        # Products in binary64, as the contract has them; the share of the test split is what is left.
        train = int(self.fractions.train * 2.0**256)
        validation = int((self.fractions.train + self.fractions.validation) * 2.0**256)
        self.thresholds = (train, validation)

    def fingerprint(self, record: Any) -> str:
        """SHA-256 (64 hex) of a JSON record under this splitter's seed."""
        parts = (_DOMAIN, self.seed_label.encode("utf-8"), canonical_json(record))
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def assign(self, record: Any) -> Partition:
        """The record's partition: its fingerprint as a 256-bit integer against the two thresholds."""
        return self._partition_of(self.fingerprint(record))

    def partition(self, items: Iterable[T], identity: Callable[[T], Any]) -> dict[Partition, tuple[T, ...]]:
        """Each distinct item once, in order of first appearance, in the partition of its identity record."""
        first: dict[str, T] = {}
        for item in items:
            first.setdefault(self.fingerprint(identity(item)), item)
        chosen: dict[Partition, list[T]] = {name: [] for name in PARTITIONS}
        for fingerprint, item in first.items():
            chosen[self._partition_of(fingerprint)].append(item)
        return {name: tuple(members) for name, members in chosen.items()}

    def _partition_of(self, fingerprint: str) -> Partition:
        position = int(fingerprint, 16)
        train, validation = self.thresholds
        return "train" if position < train else "validation" if position < validation else "test"


@dataclass(frozen=True, slots=True)
class InstructionSplits:
    """Three non-empty sets of examples."""

    train: tuple[InstructionExample, ...]
    validation: tuple[InstructionExample, ...]
    test: tuple[InstructionExample, ...]

    def __post_init__(self) -> None:
        for name, examples in self.by_name().items():
            if not examples:
                raise InputError(f"the {name} split is empty; give more records or a larger fraction")

    def by_name(self) -> dict[Partition, tuple[InstructionExample, ...]]:
        return {"train": self.train, "validation": self.validation, "test": self.test}

    @property
    def fingerprints(self) -> dict[Partition, str]:
        """Per split, SHA-256 over each example's canonical JSON and a newline, in order."""
        return {
            name: hashlib.sha256(b"".join(canonical_json(e.identity) + b"\n" for e in examples)).hexdigest()
            for name, examples in self.by_name().items()
        }

    def validate_disjoint(self) -> None:
        """InputError with the count when two splits share a (prompt, response) record."""
        _refuse_overlap({name: set(examples) for name, examples in self.by_name().items()}, "records")


class _FrozenInstructionFormatter:
    """A lookup of texts formatted once, so that every later use sees the same ones."""

    def __init__(self, name: str, texts: dict[InstructionExample, str], prompts: dict[str, str]) -> None:
        self.name = name
        self._texts = texts
        self._prompts = prompts

    def format(self, example: InstructionExample) -> str:
        try:
            return self._texts[example]
        except KeyError:
            raise InputError(f"{example!r} is in none of the frozen splits; freeze it first") from None

    def format_prompt(self, prompt: str) -> str:
        try:
            return self._prompts[prompt]
        except KeyError:
            raise InputError(
                f"the prompt {prompt!r} is in none of the frozen splits, or their formatter has no "
                "format_prompt; freeze it first with one that has"
            ) from None


def freeze_instruction_formatter(
    splits: InstructionSplits, formatter: InstructionFormatter
) -> InstructionFormatter:
    """Format every example of the splits once; an example from elsewhere is an InputError later."""
    examples = [example for members in splits.by_name().values() for example in members]
    texts = {example: formatter.format(example) for example in examples}
    prompt_of = getattr(formatter, "format_prompt", None)
    prompts = {example.prompt: prompt_of(example.prompt) for example in examples} if prompt_of else {}
    return _FrozenInstructionFormatter(type(formatter).__name__, texts, prompts)


def formatter_name(formatter: InstructionFormatter) -> str:
    """What a bundle's metadata calls a formatter: its class, or the class of the one that was frozen."""
    return formatter.name if isinstance(formatter, _FrozenInstructionFormatter) else type(formatter).__name__


def validate_formatted_splits_disjoint(splits: InstructionSplits, formatter: InstructionFormatter) -> None:
    """InputError with the count when two splits share a formatted text, as records differing in spaces do."""
    texts = {name: {formatter.format(e) for e in examples} for name, examples in splits.by_name().items()}
    _refuse_overlap(texts, "formatted texts")


def _refuse_overlap(members: dict[Partition, set[T]], what: str) -> None:
    for left, right in combinations(PARTITIONS, 2):
        if shared := len(members[left] & members[right]):
            raise InputError(
                f"{shared} {what} are in both {left} and {right} "
                f"(of {len(members[left])} and {len(members[right])}); remove them from one"
            )


def _seed_label(seed: int | str) -> str:
    if isinstance(seed, bool) or not isinstance(seed, int | str) or seed == "":
        raise InputError(f"the split seed must be an integer or a non-empty text, got {seed!r}")
    return f"int:{seed}" if isinstance(seed, int) else f"str:{seed}"
