"""8-bit weights are the nearest that their scales allow."""

import pytest
import torch
from torch.nn import functional

from kernels.decode_step.int8 import Int8Weight


@pytest.mark.parametrize("seed", range(5))
def test_int8_weights_are_the_nearest_whole_numbers_of_their_run(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(9, 150, generator=generator) * torch.randn(9, 1, generator=generator).exp()
    weight[3] = 0
    stored = Int8Weight.quantize(weight)
    assert stored.numbers.shape == (9, 3, 64)
    runs = functional.pad(weight, (0, 42)).unflatten(1, (3, 64))
    unit = runs.abs().amax(2, keepdim=True) / 127
    error = (functional.pad(stored.dequantize(), (0, 42)).unflatten(1, (3, 64)) - runs).abs()
    assert (error <= unit * 0.5001).all()
    assert (stored.numbers.abs().amax(2) == (runs.abs().amax(2) > 0) * 127).all()
