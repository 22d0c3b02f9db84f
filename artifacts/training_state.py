"""What an interrupted run needs beside its arrays and its optimizer: generators, data position, adapters.

Plain values without behaviour; their JSON forms are those of a checkpoint's manifest. The numbers that the
format keeps as float32 are rounded to it when a value is made.
"""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from artifacts.bundle_manifest import is_digest
from artifacts.checks import positive_float32, require_choice, require_integer, require_keys
from artifacts.errors import ArtifactError
from artifacts.specs import ModelConfig, ParameterSpec

PROJECTIONS = (
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.output",
    "feed_forward.expand",
    "feed_forward.project",
    "language_model_head",
)

_MT19937_WORDS = 624


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of a Python `random.Random`: its Mersenne twister's 624 words and index, and a spare gauss."""

    internal: tuple[int, ...]
    gauss_next: float | None = None

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a state that no generator can be in."""
        object.__setattr__(self, "internal", tuple(self.internal))
        if len(self.internal) != _MT19937_WORDS + 1:
            raise ValueError(f"a random state has 625 integers, got {len(self.internal)}")
        for word in self.internal[:-1]:
            require_integer("random state word", word, 0, 2**32 - 1)
        require_integer("random state index", self.internal[-1], 0, _MT19937_WORDS)
        if self.gauss_next is not None and type(self.gauss_next) is not float:
            raise TypeError(f"gauss_next must be a float or None, got {self.gauss_next!r}")
        if self.gauss_next is not None and not math.isfinite(self.gauss_next):
            raise ValueError(f"gauss_next must be finite, got {self.gauss_next}")

    @classmethod
    def from_python(cls, state: tuple[Any, ...]) -> Self:
        """The state that `getstate` of a `random.Random` returned."""
        _, internal, gauss_next = state
        return cls(internal, gauss_next)

    def to_python(self) -> tuple[int, tuple[int, ...], float | None]:
        """The state for `setstate`."""
        return 3, self.internal, self.gauss_next

    def to_json(self) -> dict[str, Any]:
        """The object of a manifest."""
        return {"version": 3, "internal": list(self.internal), "gauss_next": self.gauss_next}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The state in a manifest; TypeError or ValueError unless it is one of version 3."""
        require_keys("a random state", value, {"version", "internal", "gauss_next"})
        require_integer("random state version", value["version"], 3, 3)
        if not isinstance(value["internal"], list):
            raise TypeError("the integers of a random state must be an array")
        return cls(tuple(value["internal"]), value["gauss_next"])


@dataclass(frozen=True, slots=True)
class BatchSourceState:
    """Where a source of training batches stands; the fingerprint covers its kind, settings and data."""

    source_type: str
    fingerprint: str
    batches_emitted: int
    random_state: RandomState

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a state that no source can be in."""
        if not isinstance(self.source_type, str) or not self.source_type.strip():
            raise ValueError(f"source_type must be a text that is not blank, got {self.source_type!r}")
        if not is_digest(self.fingerprint):
            raise ValueError(f"fingerprint must be 64 lower-case hex digits, got {self.fingerprint!r}")
        require_integer("batches_emitted", self.batches_emitted, 0, None)
        if not isinstance(self.random_state, RandomState):
            raise TypeError(f"random_state must be a RandomState, got {self.random_state!r}")

    def to_json(self) -> dict[str, Any]:
        """The `batch_source` object of a manifest."""
        return {
            "source_type": self.source_type,
            "fingerprint": self.fingerprint,
            "batches_emitted": self.batches_emitted,
            "random_state": self.random_state.to_json(),
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The state in a manifest; TypeError or ValueError unless it is one."""
        require_keys("batch_source", value, {field.name for field in fields(cls)})
        return cls(**value | {"random_state": RandomState.from_json(value["random_state"])})


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The low-rank adapters of a model; targets are kept in the order of `PROJECTIONS`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    random_seed: int = 5489

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for adapters that no model can have."""
        require_integer("lora rank", self.rank, 1, 2**64 - 1)
        require_integer("lora random_seed", self.random_seed, 0, 2**32 - 1)
        object.__setattr__(self, "alpha", positive_float32("lora alpha", self.alpha))
        positive_float32("lora alpha / rank", self.alpha / self.rank)
        targets = tuple(self.targets)
        for target in targets:
            require_choice("lora target", target, PROJECTIONS)
        if not targets or len(set(targets)) < len(targets):
            raise ValueError(f"lora targets must be some projections, each once, got {targets}")
        object.__setattr__(self, "targets", tuple(sorted(targets, key=PROJECTIONS.index)))

    def adapter_specs(self, config: ModelConfig) -> tuple[ParameterSpec, ...]:
        """Names and shapes of all adapters: A [rank, input] and B [output, rank] of each target."""
        specs = []
        for linear in linear_specs(config):
            name = linear.name.removesuffix(".weight")
            if not name.endswith(self.targets):
                continue
            if self.rank > min(linear.shape):
                raise ArtifactError("lora", f"lora rank {self.rank} exceeds a side of {name} {linear.shape}")
            output_width, input_width = linear.shape
            specs.append(ParameterSpec(f"{name}.lora_a.weight", (self.rank, input_width)))
            specs.append(ParameterSpec(f"{name}.lora_b.weight", (output_width, self.rank)))
        return tuple(specs)

    def to_json(self) -> dict[str, Any]:
        """The `lora` object of a manifest."""
        return asdict(self) | {"targets": list(self.targets)}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The adapters in a manifest; TypeError or ValueError unless they are some."""
        require_keys("lora", value, {field.name for field in fields(cls)})
        if not isinstance(value["targets"], list):
            raise TypeError(f"lora targets must be an array, got {value['targets']!r}")
        return cls(**value)


def linear_specs(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """The weights of a model's linear layers, those that adapters and NF4 apply to, [output, input]."""
    specs = config.parameter_specs()
    return tuple(spec for spec in specs if spec.name.removesuffix(".weight").endswith(PROJECTIONS))
