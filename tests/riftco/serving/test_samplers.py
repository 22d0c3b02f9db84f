"""Samplers: the recorded draws, and for any logits the same as a plain transcription of the contract."""

import math
import random
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from riftco.serving import GreedySampler, TemperatureSampler
from tests.support import fixture

LOGITS = st.lists(
    st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e308, -1e308]), st.floats(-30, 30)),
    min_size=1,
    max_size=12,
)


def contract_draw(logits: list[float], temperature: float, top_k: int | None, uniform: float) -> int:
    """The contract's pseudocode, word for word."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
    weights = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    threshold, cumulative = uniform * math.fsum(weights), 0.0
    for i, weight in zip(order, weights, strict=True):
        cumulative += weight
        if threshold < cumulative:
            return i
    return order[-1]


@pytest.mark.parametrize("case", fixture("sampler.json"))
def test_recorded_draws(case: dict) -> None:
    sampler = TemperatureSampler(case["temperature"], top_k=case["top_k"], seed=case["seed"])
    assert [sampler(case["logits"]) for _ in case["tokens"]] == case["tokens"]
    assert GreedySampler()(case["logits"]) == case["greedy"]


@given(LOGITS, st.sampled_from([1e-308, 1e-3, 0.7, 1, 50.0]), st.integers(1, 12), st.integers(0, 2**64 - 1))
def test_draws_are_the_contracts(logits: list[float], temperature: float, top_k: int, seed: int) -> None:
    kept = min(top_k, len(logits))
    sampler, generator = TemperatureSampler(temperature, top_k=kept, seed=seed), random.Random(seed)
    for _ in range(4):
        expected = contract_draw(logits, temperature, kept, generator.random())
        assert sampler(logits) == expected


@given(LOGITS)
def test_greedy_is_the_lowest_id_of_the_highest(logits: list[float]) -> None:
    assert GreedySampler()(logits) == logits.index(max(logits))


@pytest.mark.parametrize("convert", [list, tuple, np.array, torch.tensor, lambda x: torch.tensor(x).double()])
def test_any_vector_is_accepted(convert: object) -> None:
    logits = convert([0.5, 2.0, -1.0, 2.0])  # type: ignore[operator]
    assert GreedySampler()(logits) == 1
    assert TemperatureSampler(1e-6, seed=4)(logits) in (1, 3)
    assert GreedySampler()([1, Fraction(3, 2), np.float32(0)]) == 1


def test_a_threshold_on_the_border_belongs_to_the_next_id(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = TemperatureSampler()
    monkeypatch.setattr(sampler._random, "random", lambda: 0.5)
    assert sampler([2.0, 2.0]) == 1


def test_the_end_of_the_walk_is_the_last_kept_id(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = TemperatureSampler(top_k=2)
    monkeypatch.setattr(sampler._random, "random", lambda: 1.0)
    assert sampler([3.0, 1.0, 3.0, 2.0]) == 2


@pytest.mark.parametrize("sampler", [GreedySampler(), TemperatureSampler()])
@pytest.mark.parametrize(
    ("logits", "error"),
    [
        ([], ValueError),
        ([1.0, math.nan], ValueError),
        ([math.inf], ValueError),
        ([10**400], ValueError),
        (["1"], ValueError),
        ([None], ValueError),
        ([1j], ValueError),
        ([1.0, True], TypeError),
        (np.array([True, False]), TypeError),
        (torch.tensor([True]), TypeError),
        (torch.zeros(1, 3), ValueError),
        (torch.tensor([0.0, -math.inf]), ValueError),
    ],
)
def test_wrong_logits_are_refused(sampler: object, logits: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        sampler(logits)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0}, ValueError, "greater than zero"),
        ({"temperature": -1.0}, ValueError, "negative"),
        ({"temperature": math.nan}, ValueError, "finite"),
        ({"temperature": 10**400}, ValueError, "finite"),
        ({"temperature": True}, TypeError, "real number"),
        ({"temperature": "1"}, TypeError, "real number"),
        ({"top_k": 0}, ValueError, "at least 1"),
        ({"top_k": True}, TypeError, "not bool"),
        ({"top_k": 1.0}, TypeError, "integer"),
        ({"seed": -1}, ValueError, "at least 0"),
        ({"seed": 2**64}, ValueError, "at most"),
        ({"seed": None}, TypeError, "integer"),
    ],
)
def test_wrong_settings_are_refused(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TemperatureSampler(**options)


def test_a_top_k_above_the_vocabulary_is_noticed_at_the_draw_and_costs_no_random_number() -> None:
    sampler, twin = TemperatureSampler(top_k=3, seed=9), TemperatureSampler(top_k=3, seed=9)
    with pytest.raises(ValueError, match="must not exceed"):
        sampler([1.0, 2.0])
    logits = [0.1, 0.2, 0.3]
    assert [sampler(logits) for _ in range(20)] == [twin(logits) for _ in range(20)]


def test_a_draw_over_4096_logits_takes_milliseconds_at_most() -> None:
    sampler, logits = TemperatureSampler(seed=1), torch.randn(4096)
    sampler(logits)
    started = time.process_time()
    for _ in range(20):
        sampler(logits)
    assert (time.process_time() - started) / 20 < 0.01
