"""Tokens per second of training alone, operations a token, and the machine's own limit."""

import random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from artifacts import ModelConfig
from riftco.config import LORA_TARGETS, LoraConfig
from riftco.model import DecoderOnlyTransformer
from riftco.training.tracking import pace
from riftco.training.tracking.pace import PaceMeter, flops_per_token, matrix_limit, peak_memory_bytes

CPU = torch.device("cpu")


class Watch:
    """A clock that is told how late it is."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_step_lasts_from_resume_to_its_metric() -> None:
    watch = Watch()
    meter = PaceMeter(watch)
    meter.resume()
    watch.now += 2.0
    assert meter.step(100) == 50
    watch.now += 1000.0  # handling the metric, then validation
    meter.resume()
    watch.now += 3.0
    assert meter.step(150) == pytest.approx(250 / 5)


def test_there_is_no_pace_before_a_step_was_timed_or_without_its_tokens() -> None:
    watch = Watch()
    meter = PaceMeter(watch)
    assert meter.step(100) is None
    meter.resume()
    assert meter.step(100) is None  # no time went by
    timed = PaceMeter(watch)
    timed.resume()
    watch.now += 1.0
    assert timed.step(None) is None


@example([(2**step, 1) for step in range(30)])
@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 50)), min_size=1, max_size=60))
def test_the_pace_is_that_of_the_newest_twenty_steps(steps: list[tuple[int, int]]) -> None:
    watch = Watch()
    meter = PaceMeter(watch)
    for tokens, seconds in steps:
        meter.resume()
        watch.now += seconds
        pace = meter.step(tokens)
        watch.now += 7
    newest = steps[-20:]
    assert pace == pytest.approx(sum(t for t, _ in newest) / sum(s for _, s in newest))


@pytest.mark.parametrize("vocabulary_size", [11, 40])
def test_each_weight_of_a_linear_layer_costs_six_operations(vocabulary_size: int) -> None:
    config = ModelConfig(vocabulary_size, 6, 8, 2, 3, 20, random_seed=1)
    model = DecoderOnlyTransformer(config)
    weights = sum(linear.weight.numel() for _, linear in model.projections())
    attention = 3 * 12 * 8 * 5
    assert flops_per_token(config, 5) == 6 * weights + attention
    model.attach_lora(LoraConfig(rank=2, targets=LORA_TARGETS))
    adapters = sum(parameter.numel() for parameter in model.adapter_parameters().values())
    assert flops_per_token(config, 5, adapters) == 4 * weights + 6 * adapters + attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_limit_is_the_rate_of_a_product(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(pace, "_MEASURING_SECONDS", 0.02)
    state, numbers = torch.get_rng_state(), random.getstate()
    limit = matrix_limit(CPU, dtype)
    assert torch.get_rng_state().equal(state)
    assert random.getstate() == numbers
    assert 1e8 < limit < 1e15


def test_the_limit_of_int8_is_that_of_float32_matrices_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def product(a: torch.Tensor, b: torch.Tensor, *, operands: str) -> torch.Tensor:
        seen.add((a.dtype, b.dtype, operands))
        return a @ b

    monkeypatch.setattr(pace, "_MEASURING_SECONDS", 0.02)
    monkeypatch.setattr(pace, "linear", product)
    matrix_limit(CPU, torch.int8)
    assert seen == {(torch.float32, torch.float32, "int8")}


@pytest.mark.parametrize(("rate", "last"), [(5e10, 1024), (5e13, 8192), (5e15, 8192)])
def test_the_limit_comes_from_a_product_long_enough_to_time(
    monkeypatch: pytest.MonkeyPatch, rate: float, last: int
) -> None:
    sides: list[int] = []

    def product_seconds(side: int, *_: object, tries: int) -> float:
        sides.append(side)
        return 2 * side**3 / rate

    monkeypatch.setattr(pace, "_product_seconds", product_seconds)
    assert matrix_limit(CPU, torch.float32) == pytest.approx(rate)
    assert sides == [side for side in (2**i for i in range(7, 14)) if side <= last] + [last]


def test_peak_memory_never_falls_and_is_in_bytes() -> None:
    before = peak_memory_bytes(CPU)
    torch.ones(before // 4 + (8 << 20))  # as much as the process has, and 32 MiB
    assert peak_memory_bytes(CPU) > 16 << 20
    assert peak_memory_bytes(CPU) >= before
