"""Generators, data position and adapters of an interrupted run: exact, and none that no run could have."""

import random

import numpy as np
import pytest

from artifacts import ArtifactError, BatchSourceState, LoraSpec, ModelConfig, RandomState
from artifacts.training_state import PROJECTIONS
from tests.artifacts.checkpoints import RANDOM, source

WORDS = (1,) * 624


def test_a_random_generator_goes_on_from_its_state():
    generator = random.Random(5)
    generator.gauss(0, 1)
    state = RandomState.from_python(generator.getstate())
    assert state.gauss_next is not None
    assert state.to_python() == generator.getstate()
    assert RandomState.from_json(state.to_json()) == state
    other = random.Random()
    other.setstate(state.to_python())
    assert [other.gauss(0, 1) for _ in range(3)] == [generator.gauss(0, 1) for _ in range(3)]


@pytest.mark.parametrize(
    ("internal", "gauss", "error"),
    [
        ((*WORDS[1:], 1), None, ValueError),
        ((*WORDS, 1, 1), None, ValueError),
        ((*WORDS, 625), None, ValueError),
        ((*WORDS, -1), None, ValueError),
        ((2**32, *WORDS), None, ValueError),
        ((-1, *WORDS), None, ValueError),
        ((True, *WORDS), None, TypeError),
        ((1.0, *WORDS), None, TypeError),
        ((*WORDS, 1), float("nan"), ValueError),
        ((*WORDS, 1), float("-inf"), ValueError),
        ((*WORDS, 1), 1, TypeError),
    ],
)
def test_states_of_no_generator_are_refused(internal, gauss, error):
    with pytest.raises(error):
        RandomState(internal, gauss)


def test_every_state_that_is_accepted_can_be_set():
    for index in (0, 1, 624):
        random.Random().setstate(RandomState((2**32 - 1, *WORDS[1:], index), -0.5).to_python())


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"version": True}, {"version": 3.0}, {"internal": "1" * 625}, {"extra": 1}]
)
def test_random_states_of_another_form_are_refused(change):
    with pytest.raises((TypeError, ValueError)):
        RandomState.from_json(RANDOM.to_json() | change)


def test_a_batch_source_comes_back_from_its_json():
    assert BatchSourceState.from_json(source().to_json()) == source()


@pytest.mark.parametrize(
    "change",
    [
        {"source_type": " "},
        {"source_type": 1},
        {"fingerprint": "AB" * 32},
        {"fingerprint": "ab" * 31},
        {"batches_emitted": -1},
        {"batches_emitted": True},
        {"random_state": RANDOM.to_json()},
    ],
)
def test_batch_sources_that_cannot_be_are_refused(change):
    with pytest.raises((TypeError, ValueError)):
        source(**change)


def test_targets_are_kept_in_the_order_of_the_model():
    spec = LoraSpec(2, 4.1, tuple(reversed(PROJECTIONS)))
    assert spec.targets == PROJECTIONS
    assert spec.alpha == float(np.float32(4.1))
    assert LoraSpec.from_json(spec.to_json()) == spec


def test_adapters_follow_the_layers_of_the_model():
    config = ModelConfig(5, 4, 6, 2, 2, 7)
    specs = LoraSpec(2, 1.0, ("language_model_head", "feed_forward.expand")).adapter_specs(config)
    assert [(spec.name, spec.shape) for spec in specs] == [
        ("blocks.0.feed_forward.expand.lora_a.weight", (2, 6)),
        ("blocks.0.feed_forward.expand.lora_b.weight", (7, 2)),
        ("blocks.1.feed_forward.expand.lora_a.weight", (2, 6)),
        ("blocks.1.feed_forward.expand.lora_b.weight", (7, 2)),
        ("language_model_head.lora_a.weight", (2, 6)),
        ("language_model_head.lora_b.weight", (5, 2)),
    ]
    LoraSpec(5, 1.0, ("language_model_head",)).adapter_specs(config)
    with pytest.raises(ArtifactError, match="rank 6 exceeds"):
        LoraSpec(6, 1.0, ("language_model_head",)).adapter_specs(config)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 0},
        {"rank": True},
        {"alpha": 0.0},
        {"alpha": 1e39},
        {"alpha": 1e-45, "rank": 2**20},
        {"targets": ()},
        {"targets": ("attention",)},
        {"targets": ("attention.query", "attention.query")},
        {"random_seed": -1},
        {"random_seed": 2**32},
    ],
)
def test_adapters_that_no_model_can_have_are_refused(change):
    with pytest.raises((TypeError, ValueError)):
        LoraSpec(**({"rank": 2, "alpha": 4.0, "targets": ("attention.query",)} | change))
