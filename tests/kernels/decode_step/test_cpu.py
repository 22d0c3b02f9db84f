"""Panels hold weights as the native step reads them."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.decode_step import cpu
from kernels.decode_step.int8 import Int8Weight

MATRICES = pytest.mark.parametrize(
    ("count", "outputs", "inputs"),
    [(1, 1, 1), (1, 16, 4), (3, 10, 7), (1, 33, 18), (2, 24, 13), (3, 1, 5), (1, 200, 1026), (3, 304, 255)],
)


def random_matrices(count: int, outputs: int, inputs: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(inputs)
    return list(torch.randn(count, outputs, inputs, generator=generator))


def in_panels(matrices: list[Tensor], input_unit: int = 1) -> Tensor:
    """`[panels, in, 16]`, padded with zeros."""
    stacked = torch.cat(matrices)
    padded = functional.pad(stacked, (0, -stacked.shape[1] % input_unit, 0, -len(stacked) % 16))
    return padded.view(-1, 16, padded.shape[1]).transpose(1, 2)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not cpu.built, reason="not built")
@pytest.mark.usefixtures("threads")
@MATRICES
def test_panels_hold_outputs_side_by_side_and_zeros_beyond(count: int, outputs: int, inputs: int) -> None:
    matrices = random_matrices(count, outputs, inputs)
    assert torch.equal(cpu.pack_panels(matrices), in_panels(matrices))


@pytest.mark.skipif(not cpu.built, reason="not built")
@pytest.mark.usefixtures("threads")
@MATRICES
def test_fixed_panels_hold_bfloat16_weights_within_half_a_unit_of_their_run(
    count: int, outputs: int, inputs: int
) -> None:
    matrices = random_matrices(count, outputs, inputs)
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -0.0, 1e-40, -3e38])  # to even, up, zero, denormal, large
    matrices[-1][0, :5] = ties[:inputs]
    matrices[0][1:2] = 0
    numbers, scales = cpu.pack_fixed_panels(matrices)
    rounded = in_panels([x.bfloat16().float() for x in matrices], 64)
    runs = rounded.unflatten(1, (-1, 64))  # [panels, runs, 64, 16]
    assert torch.equal(scales, runs.abs().amax(2))
    actual = numbers.transpose(3, 4).flatten(2, 3).double() * (scales[:, :, None].double() / 8192)
    assert ((actual - runs.double()).abs() <= scales[:, :, None].double() / 8192 * 0.5001).all()
    assert numbers.abs().amax() == 8192


@pytest.mark.skipif(not cpu.built, reason="not built")
@pytest.mark.usefixtures("threads")
@MATRICES
def test_byte_panels_hold_the_numbers_of_int8_weights_and_128(count: int, outputs: int, inputs: int) -> None:
    matrices = random_matrices(count, outputs, inputs)
    matrices[-1][0, :3] = torch.tensor([-1e-12, 3e20, 1.5])[:inputs]
    matrices[0][1:2] = 0
    panels, scales = cpu.pack_fixed_panels(matrices, in_bytes=True)
    weight = Int8Weight.quantize(torch.cat(matrices))
    assert torch.equal(scales.transpose(1, 2).flatten(0, 1)[: len(weight.scales)], weight.scales)
    numbers = panels.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(2).int() - 128
    means = weight.scales[:, :, None] > 0
    assert torch.equal(numbers[: len(weight.numbers)] * means, weight.numbers.int())
    assert numbers.min() >= -128
