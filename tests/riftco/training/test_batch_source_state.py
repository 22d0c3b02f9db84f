"""Every batch source tells where it stands and goes on from there, and takes no other source's word."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import BatchSourceState, RandomState
from riftco.training import (
    DocumentRowsBatchSource,
    ExampleWindowBatchSource,
    PackedRowsBatchSource,
    RandomWindowBatchSource,
    SequenceWindowBatchSource,
    TrainingBatch,
)
from riftco.training.batches import SequenceSource
from tests.support import fixture

SEQUENCES = [[100 * index + place for place in range(3 + 2 * index)] for index in range(5)]
SIZES = {"batch_size": 2, "context_size": 4, "random_seed": 7}


def random_window(sequences: list[list[int]] = SEQUENCES, **sizes: int) -> SequenceSource:
    return RandomWindowBatchSource([token for row in sequences for token in row], **(SIZES | sizes))


def of(kind: Callable[..., SequenceSource]) -> Callable[..., SequenceSource]:
    return lambda sequences=SEQUENCES, **sizes: kind(sequences, **(SIZES | sizes))


WINDOWS = {
    "random_window": random_window,
    "sequence_window": of(SequenceWindowBatchSource),
    "example_window": of(ExampleWindowBatchSource),
}
ROWS = {"document_rows": of(DocumentRowsBatchSource), "packed": of(PackedRowsBatchSource)}
BUILDS: dict[str, Callable[..., SequenceSource]] = WINDOWS | ROWS
each = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


def rows(batch: TrainingBatch) -> list[Any]:
    parts = (batch.inputs, batch.targets, batch.mask, batch.document_starts)
    return [None if part is None else part.tolist() for part in parts]


@each
@given(emitted=st.integers(0, 12), ahead=st.integers(0, 12))
@settings(max_examples=15, deadline=None)
def test_a_source_goes_on_with_the_batches_that_would_have_followed(
    build: Callable[..., SequenceSource], emitted: int, ahead: int
) -> None:
    source, other = build(), build()
    for _ in range(emitted):
        source.next_batch()
    for _ in range(ahead):
        other.next_batch()
    state = source.checkpoint_state()
    assert BatchSourceState.from_json(state.to_json()) == state
    assert (state.source_type, state.batches_emitted) == (source.source_type, emitted)
    other.restore_checkpoint_state(state)
    assert other.checkpoint_state() == state
    for _ in range(4):
        assert rows(other.next_batch()) == rows(source.next_batch())


@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_are_drawn_from_the_stored_generator_whatever_the_seed(kind: str) -> None:
    source, other = WINDOWS[kind](), WINDOWS[kind](random_seed=99)
    source.next_batch()
    other.restore_checkpoint_state(source.checkpoint_state())
    assert rows(other.next_batch()) == rows(source.next_batch())


@pytest.mark.parametrize("kind", ROWS)
def test_another_seed_of_rows_in_order_is_refused_and_changes_nothing(kind: str) -> None:
    source, other = ROWS[kind](), ROWS[kind](random_seed=99)
    other.next_batch()
    before = other.checkpoint_state()
    with pytest.raises(ValueError, match="another random_seed than 99"):
        other.restore_checkpoint_state(source.checkpoint_state())
    assert other.checkpoint_state() == before


@each
@pytest.mark.parametrize("change", ["sequences", "batch_size", "context_size"])
def test_a_source_of_other_data_or_sizes_is_refused_and_changes_nothing(
    build: Callable[..., SequenceSource], change: str
) -> None:
    other = build(SEQUENCES[:-1]) if change == "sequences" else build(**{change: 3})
    source, before = build(), other.checkpoint_state()
    with pytest.raises(
        ValueError, match=f"fingerprint {source.fingerprint} and this one has {before.fingerprint}"
    ):
        other.restore_checkpoint_state(source.checkpoint_state())
    assert other.checkpoint_state() == before


@each
def test_another_kind_of_source_is_refused_by_both_names(build: Callable[..., SequenceSource]) -> None:
    source = build()
    for other in BUILDS.values():
        if (theirs := other()).source_type != source.source_type:
            with pytest.raises(
                ValueError, match=f"{theirs.source_type} and this one has {source.source_type}"
            ):
                source.restore_checkpoint_state(theirs.checkpoint_state())
    with pytest.raises(TypeError, match="goes on from a BatchSourceState, got dict"):
        source.restore_checkpoint_state(source.checkpoint_state().to_json())  # type: ignore[arg-type]
    assert source.batches_emitted == 0


@each
def test_telling_where_it_stands_draws_nothing(build: Callable[..., SequenceSource]) -> None:
    source, other = build(), build()
    for _ in range(3):
        source.checkpoint_state()
        assert rows(source.next_batch()) == rows(other.next_batch())


def test_a_stored_generator_at_any_place_is_taken_as_it_is() -> None:
    source = random_window()
    words = RandomState((2**32 - 1,) * 624 + (1,), gauss_next=0.5)
    source.restore_checkpoint_state(replace(source.checkpoint_state(), random_state=words, batches_emitted=9))
    assert source.checkpoint_state().random_state == words
    assert source.checkpoint_state().batches_emitted == 9


def test_the_originals_recorded_position_gives_its_recorded_batches() -> None:
    recorded = fixture("batching.json")
    case = recorded["example_window"]
    sizes = {name: case[name] for name in SIZES}
    source = ExampleWindowBatchSource(recorded["sequences"], **sizes)
    states = []
    for _ in case["inputs"]:
        states.append(source.checkpoint_state())
        source.next_batch()
    for state, inputs in reversed(list(zip(states, case["inputs"], strict=True))):
        source.restore_checkpoint_state(state)
        assert source.next_batch().inputs.tolist() == inputs
