"""Assignment by stable hash, exact to the original, and splits that share nothing."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from riftco.data import (
    InstructionExample,
    InstructionSplits,
    PlainChatFormatter,
    SplitFractions,
    StableHashSplitter,
    format_parts,
    formatter_name,
    freeze_instruction_formatter,
    validate_formatted_splits_disjoint,
)
from riftco.errors import InputError
from tests.support import fixture

SPLITS = fixture("splits.json")


def examples(*texts: str) -> tuple[InstructionExample, ...]:
    return tuple(InstructionExample(f"{text}?", text) for text in texts)


@pytest.mark.parametrize("case", SPLITS["splitters"], ids=lambda case: str(case["seed_label"]))
def test_thresholds_fingerprints_and_assignments_are_the_recorded_ones(case: dict) -> None:
    splitter = StableHashSplitter(SplitFractions(*case["fractions"]), seed=case["seed"])
    assert splitter.seed_label == case["seed_label"]
    assert [hex(threshold) for threshold in splitter.thresholds] == case["thresholds_hex"]
    assert [splitter.fingerprint(record) for record in SPLITS["records"]] == case["fingerprints"]
    assert [splitter.assign(record) for record in SPLITS["records"]] == case["assignments"]


@pytest.mark.parametrize("fractions", [(0.5, 0.5, 0.1), (-0.1, 1.0, 0.1), (float("nan"), 0.5, 0.5)])
def test_fractions_that_are_no_shares_are_refused(fractions: tuple[float, float, float]) -> None:
    with pytest.raises(InputError, match="add up to 1"):
        SplitFractions(*fractions)


@pytest.mark.parametrize("seed", ["", True, 1.5, None])
def test_a_seed_without_a_label_is_refused(seed: object) -> None:
    with pytest.raises(InputError, match="split seed"):
        StableHashSplitter(seed=seed)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 200)), st.randoms())
def test_a_partition_holds_each_record_once_whatever_the_order(
    numbers: list[int], rng: random.Random
) -> None:
    splitter = StableHashSplitter(SplitFractions(0.5, 0.5, 0.0))
    parts = splitter.partition(numbers, lambda number: {"text": str(number)})
    kept = [number for members in parts.values() for number in members]
    assert sorted(kept) == sorted(set(numbers))
    assert parts["train"] == tuple(n for n in dict.fromkeys(numbers) if n in parts["train"])
    rng.shuffle(numbers)
    again = splitter.partition(numbers, lambda number: {"text": str(number)})
    assert {name: set(members) for name, members in again.items()} == {k: set(v) for k, v in parts.items()}


def test_a_record_is_its_identity_and_the_first_one_stays() -> None:
    parts = StableHashSplitter(SplitFractions(1.0, 0.0, 0.0)).partition(["A", "b", "a"], str.lower)
    assert parts == {"train": ("A", "b"), "validation": (), "test": ()}


def test_split_fingerprints_are_the_recorded_ones() -> None:
    records = fixture("training.json")["post_training_full"]["examples"]
    members = [InstructionExample(**record) for record in records]
    splits = InstructionSplits(tuple(members[:2]), tuple(members[2:4]), tuple(members[4:]))
    expected = fixture("batching.json")["fingerprints"]
    assert splits.fingerprints == {name: expected[name] for name in ("train", "validation", "test")}


def test_an_empty_split_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="validation split is empty"):
        InstructionSplits(examples("a"), (), examples("b"))


@pytest.mark.parametrize(
    ("splits", "pair"),
    [
        ((("a", "b", "c"), ("b", "c"), ("d",)), "2 records are in both train and validation"),
        ((("a", "b"), ("c",), ("b", "d")), "1 records are in both train and test"),
        ((("a",), ("b", "c"), ("c",)), "1 records are in both validation and test"),
    ],
)
def test_overlap_is_refused_with_its_count(splits: tuple[tuple[str, ...], ...], pair: str) -> None:
    with pytest.raises(InputError, match=pair):
        InstructionSplits(*(examples(*texts) for texts in splits)).validate_disjoint()


def test_the_same_prompt_with_another_response_is_another_record() -> None:
    InstructionSplits(
        (InstructionExample("p", "a"),), (InstructionExample("p", "b"),), (InstructionExample("p", "c"),)
    ).validate_disjoint()


def test_records_that_format_alike_are_caught_after_formatting() -> None:
    splits = InstructionSplits(examples("a"), (InstructionExample(" a?\n", "a "),), examples("b"))
    splits.validate_disjoint()
    with pytest.raises(InputError, match="1 formatted texts are in both train and validation"):
        validate_formatted_splits_disjoint(splits, PlainChatFormatter())
    other = InstructionSplits(examples("a"), examples("c"), examples("b"))
    validate_formatted_splits_disjoint(other, PlainChatFormatter())


def test_a_frozen_formatter_formats_once_and_knows_nothing_else() -> None:
    class Counting(PlainChatFormatter):
        calls = 0

        def format(self, example: InstructionExample) -> str:
            self.calls += 1
            return super().format(example)

    formatter = Counting()
    splits = InstructionSplits(examples("a", "b"), examples("c"), examples("d"))
    frozen = freeze_instruction_formatter(splits, formatter)
    assert [frozen.format(e) for e in splits.train * 2] == [
        PlainChatFormatter().format(e) for e in splits.train * 2
    ]
    assert formatter.calls == 4
    assert formatter_name(frozen) == formatter_name(formatter) == "Counting"
    with pytest.raises(InputError, match="none of the frozen splits"):
        frozen.format(InstructionExample("new", "one"))
    for example in splits.train:
        assert format_parts(frozen, example) == format_parts(PlainChatFormatter(), example)
    with pytest.raises(InputError, match="'new' is in none of the frozen splits"):
        frozen.format_prompt("new")  # type: ignore[attr-defined]
