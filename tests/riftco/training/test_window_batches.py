"""The contract's samplers, exact to the original's recorded batches."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from riftco.training import (
    ExampleWindowBatchSource,
    RandomWindowBatchSource,
    SequenceWindowBatchSource,
    fixed_batches,
)
from riftco.training.window_batches import WindowSource
from tests.support import fixture

BATCHING = fixture("batching.json")
SOURCES: dict[str, Callable[..., WindowSource]] = {
    "random_window": RandomWindowBatchSource,
    "sequence_window": SequenceWindowBatchSource,
    "example_window": ExampleWindowBatchSource,
}
SIZES = {"batch_size": 2, "context_size": 3, "random_seed": 0}


def recorded(source_type: str) -> tuple[WindowSource, dict[str, Any]]:
    case = BATCHING[source_type]
    texts = BATCHING["tokens" if source_type == "random_window" else "sequences"]
    sizes = {name: case[name] for name in SIZES}
    return SOURCES[source_type](texts, **sizes), case


@pytest.mark.parametrize("source_type", SOURCES)
def test_batches_fingerprint_and_generator_are_the_recorded_ones(source_type: str) -> None:
    source, case = recorded(source_type)
    batches = fixed_batches(source, len(case["inputs"]))
    assert [batch.inputs.tolist() for batch in batches] == case["inputs"]
    assert batches[0].targets.tolist() == case["targets_of_first"]
    assert source.fingerprint == case["fingerprint"]
    assert source.batches_emitted == case["batches_emitted"]
    state = list(source.checkpoint_state().random_state.to_json().values())
    assert hashlib.sha256(json.dumps(state).encode()).hexdigest() == case["rng_state_sha256"]


def test_the_fingerprint_tells_tokens_and_sizes_apart_but_not_seeds() -> None:
    def fingerprint(tokens: list[int], **changes: int) -> str:
        return RandomWindowBatchSource(tokens, **{**SIZES, **changes}).fingerprint

    tokens = list(range(9))
    same = fingerprint(tokens)
    assert fingerprint(tokens, random_seed=5) == same
    others = [
        fingerprint(tokens, batch_size=3),
        fingerprint(tokens, context_size=2),
        fingerprint(tokens[:-1]),
    ]
    others.append(SequenceWindowBatchSource([tokens], **SIZES).fingerprint)
    assert len({same, *others}) == 5


@pytest.mark.parametrize("source", [SequenceWindowBatchSource, ExampleWindowBatchSource])
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 2**40))
def test_no_window_crosses_a_sequence(source: type[WindowSource], lengths: list[int], seed: int) -> None:
    lengths = [*lengths, 5]
    sequences = [[100 * index + place for place in range(length)] for index, length in enumerate(lengths)]
    batches = fixed_batches(source(sequences, batch_size=4, context_size=3, random_seed=seed), 3)
    for batch in batches:
        for row in [[*i, t[-1]] for i, t in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)]:
            assert row == list(range(row[0], row[0] + 4))
            assert row[-1] % 100 < lengths[row[0] // 100]


@pytest.mark.parametrize(
    ("source", "share"), [(SequenceWindowBatchSource, 17 / 18), (ExampleWindowBatchSource, 1 / 2)]
)
def test_long_sequences_come_up_by_windows_or_evenly(source: type[WindowSource], share: float) -> None:
    batch = source(
        [[0] * 4, [1] * 20], batch_size=4000, context_size=3, random_seed=1
    ).next_batch()  # one window, and 17
    assert abs(batch.inputs.float().mean().item() - share) < 0.03


def test_a_sequence_of_just_one_window_is_usable() -> None:
    source = RandomWindowBatchSource([7, 8, 9, 10], **SIZES)
    assert source.next_batch().inputs.tolist() == [[7, 8, 9]] * 2


@pytest.mark.parametrize("source_type", SOURCES)
def test_text_too_short_for_the_context_is_refused_with_both_numbers(source_type: str) -> None:
    texts = [1, 2, 3] if source_type == "random_window" else [[1], [1, 2, 3]]
    with pytest.raises(ValueError, match="context of 3 needs a sequence of 4 tokens and the longest has 3"):
        SOURCES[source_type](texts, **SIZES)


def test_no_sequences_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="the longest has 0"):
        ExampleWindowBatchSource([], **SIZES)


@pytest.mark.parametrize(("name", "value"), [("batch_size", 0), ("context_size", 0), ("random_seed", -1)])
def test_sizes_and_seed_are_checked(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        RandomWindowBatchSource(list(range(9)), **{**SIZES, name: value})
    with pytest.raises(TypeError, match=name):
        RandomWindowBatchSource(list(range(9)), **{**SIZES, name: True})
