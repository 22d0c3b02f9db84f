"""Factors rounded to bytes, and the word for it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import (
    feed_forward,
    linear,
    linear_cross_entropy,
    lora_linear,
    nf4_linear,
    qkv_linear,
    quantize_nf4,
)
from kernels.operands import RUN, in_bytes
from tests.kernels.cases import random

X, W, B = random(3, 8), random(8, 8), random(8)
TARGETS = torch.zeros(3, dtype=torch.int64)
CALLS: list[Callable[..., object]] = [
    lambda **word: linear(X, W, B, **word),
    lambda **word: qkv_linear(X, W, B, W, B, W, B, **word),
    lambda **word: feed_forward(X, W, B, W, B, X, **word),
    lambda **word: lora_linear(X, W, B, W, W, 1.0, **word),
    lambda **word: nf4_linear(X, quantize_nf4(W), B, **word),
    lambda **word: linear_cross_entropy(X, W, B, TARGETS, **word),
]


@pytest.mark.parametrize("call", CALLS)
def test_other_words_are_refused(call: Callable[..., object]) -> None:
    for word in ("full", "half", "int8"):
        call(operands=word)
    for word in ("int4", "", True):
        with pytest.raises(ValueError, match=r"operands must be one of full, half, int8, got"):
            call(operands=word)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("count", [1, RUN - 1, RUN, 2 * RUN + 1])
def test_bytes_are_the_nearest_of_255_multiples_of_a_run(axis: int, count: int) -> None:
    x = random(*((count, 5) if axis == 0 else (5, count)))
    found = in_bytes(x, axis)
    for line, rounded in zip(x.unbind(1 - axis), found.unbind(1 - axis), strict=True):
        for run, values in zip(line.split(RUN), rounded.split(RUN), strict=True):
            scale = float(run.abs().max()) / 127
            whole = values.double() / scale
            assert float((whole - whole.round()).abs().max()) < 1e-4
            assert float(whole.abs().max()) == pytest.approx(127)
            assert float((values - run).abs().max()) <= 0.5001 * scale


def test_zeros_stay_zeros_and_what_is_no_number_fills_its_run() -> None:
    x: Tensor = torch.zeros(3, 2 * RUN)
    x[1, 5], x[2, 5] = torch.nan, torch.inf
    found = in_bytes(x, 1)
    assert not found[0].any()
    assert found[1:, :RUN].isnan().all()
    assert not found[1:, RUN:].any()
