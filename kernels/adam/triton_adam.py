"""Adam's step on GPUs, many tensors in one launch, in float64.

Tensors are found through tables of addresses: a program reads which one it belongs to, and owns BLOCK
elements of it. Measuring reads 16 bytes per element; the update reads 16, writes 12, and computes one square
root and three divisions in float64. Parameters, gradients and moments are dense float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adam.reference import COLUMNS, ROWS
from kernels.adam.transaction import Bounds, Settings, run, versions

_BLOCK = 1024
_EXACT = {"enable_fp_fusion": False}


@triton.jit
def _floats(address):
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def _squares_kernel(arrays_ptr, owners_ptr, firsts_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners_ptr + program)
    values_ptr = _floats(tl.load(arrays_ptr + 2 * owner))
    count = tl.load(arrays_ptr + 2 * owner + 1)
    i = (program - tl.load(firsts_ptr + owner)) * ROWS * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((COLUMNS,), tl.float64)
    for _ in range(ROWS):
        value = tl.load(values_ptr + i, mask=i < count, other=0.0).to(tl.float64)
        sums += value * value
        i += COLUMNS
    for level in tl.static_range(8):
        sums = tl.sum(tl.reshape(sums, (2, COLUMNS >> (level + 1))), axis=0)
    tl.store(out_ptr + program + tl.arange(0, 1), sums)


@triton.jit
def _largest(values_ptr, i, mask, WITHOUT_SIGN: tl.constexpr):
    pattern = tl.load(values_ptr + i, mask=mask, other=0.0).to(tl.uint32, bitcast=True).to(tl.int64)
    if WITHOUT_SIGN:
        pattern = pattern & 0x7FFFFFFF
    return tl.max(pattern, axis=0)


@triton.jit
def _segment(segments_ptr, owners_ptr, firsts_ptr, BLOCK: tl.constexpr):
    """Pointers to parameter, gradient and moments, the program's elements, and which of them exist."""
    program = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners_ptr + program)
    i = (program - tl.load(firsts_ptr + owner)) * BLOCK + tl.arange(0, BLOCK)
    row_ptr = segments_ptr + 5 * owner
    parameter_ptr, gradient_ptr = _floats(tl.load(row_ptr)), _floats(tl.load(row_ptr + 1))
    first_ptr, second_ptr = _floats(tl.load(row_ptr + 2)), _floats(tl.load(row_ptr + 3))
    return parameter_ptr, gradient_ptr, first_ptr, second_ptr, i, i < tl.load(row_ptr + 4)


@triton.jit
def _extremes_kernel(segments_ptr, owners_ptr, firsts_ptr, out_ptr, BLOCK: tl.constexpr):
    parameter_ptr, _, first_ptr, second_ptr, i, mask = _segment(segments_ptr, owners_ptr, firsts_ptr, BLOCK)
    out = out_ptr + 3 * tl.program_id(0).to(tl.int64)
    tl.store(out, _largest(parameter_ptr, i, mask, True))
    tl.store(out + 1, _largest(first_ptr, i, mask, True))
    tl.store(out + 2, _largest(second_ptr, i, mask, False))


@triton.jit
def _is_finite(x):
    return (x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@triton.jit
def _update_kernel(
    segments_ptr, owners_ptr, firsts_ptr, settings_ptr, finite_ptr, WRITE: tl.constexpr, BLOCK: tl.constexpr
):
    parameter_ptr, gradient_ptr, first_ptr, second_ptr, i, mask = _segment(
        segments_ptr, owners_ptr, firsts_ptr, BLOCK
    )
    clip, beta1, beta2 = tl.load(settings_ptr), tl.load(settings_ptr + 1), tl.load(settings_ptr + 2)
    correction1, correction2 = tl.load(settings_ptr + 3), tl.load(settings_ptr + 4)
    rate, epsilon = tl.load(settings_ptr + 5), tl.load(settings_ptr + 6)
    parameter = tl.load(parameter_ptr + i, mask=mask, other=0.0).to(tl.float64)
    g = tl.load(gradient_ptr + i, mask=mask, other=0.0).to(tl.float64) * clip
    m = tl.load(first_ptr + i, mask=mask, other=0.0).to(tl.float64) * beta1 + g * (1.0 - beta1)
    v = tl.load(second_ptr + i, mask=mask, other=0.0).to(tl.float64) * beta2 + g * (1.0 - beta2) * g
    denominator = tl.sqrt(v / correction2) + epsilon
    theta = (parameter - m / correction1 * rate / denominator).to(tl.float32)
    if WRITE:
        tl.store(parameter_ptr + i, theta, mask=mask)
        tl.store(first_ptr + i, m.to(tl.float32), mask=mask)
        tl.store(second_ptr + i, v.to(tl.float32), mask=mask)
    else:
        finite = _is_finite(theta) & _is_finite(m.to(tl.float32)) & _is_finite(v.to(tl.float32))
        tl.store(finite_ptr + tl.program_id(0).to(tl.int64), tl.min(finite.to(tl.int32), axis=0))


def step(
    first: Tensor,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first_pages: Sequence[Tensor],
    second_pages: Sequence[Tensor],
    page_counts: Sequence[int],
    settings: Settings,
) -> Any:
    """As `reference.step`, for tensors that lie dense in memory; gradients are made so."""
    written = [*parameters, *first_pages, *second_pages]
    if not all(map(Tensor.is_contiguous, written)):
        return NotImplemented
    versions(written)
    gradients = [g.contiguous() for g in gradients]
    norm, clip, _ = run(Arrays(parameters, gradients, first_pages, second_pages, page_counts), settings)
    torch.autograd.graph.increment_version(written)
    return norm, clip


class Arrays:
    """`transaction.Arrays` on a GPU; the tensors have to outlive it."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        first_pages: Sequence[Tensor],
        second_pages: Sequence[Tensor],
        page_counts: Sequence[int],
    ) -> None:
        self.device = parameters[0].device
        segments = []
        pages = zip(first_pages, second_pages, strict=True)
        for parameter, gradient, count in zip(parameters, gradients, page_counts, strict=True):
            offset = 0
            for _ in range(count):
                m, v = next(pages)
                addresses = (parameter.data_ptr() + offset, gradient.data_ptr() + offset)
                segments.append((*addresses, m.data_ptr(), v.data_ptr(), m.numel()))
                offset += 4 * m.numel()
        self._segments = self._table(segments, _BLOCK)
        self._gradients = self._table([(g.data_ptr(), g.numel()) for g in gradients], ROWS * COLUMNS)

    def measure(self) -> tuple[float, Bounds]:
        squares, extremes = self.launch_measure()
        total = 0.0
        for value in squares.tolist():
            total += value
        return total, Bounds.of_patterns(extremes.amax(0).tolist() if len(extremes) else [0, 0, 0])

    def finite(self, settings: tuple[float, ...]) -> bool:
        return bool(self.launch_update(settings, write=False).all())

    def apply(self, settings: tuple[float, ...]) -> None:
        self.launch_update(settings, write=True)

    def launch_measure(self) -> tuple[Tensor, Tensor]:
        """The sum of squares of each chunk, and the largest bit patterns of each block."""
        squares = torch.empty(self._gradients[3], dtype=torch.float64, device=self.device)
        extremes = torch.empty(self._segments[3], 3, dtype=torch.int64, device=self.device)
        if len(squares):
            _squares_kernel[(len(squares),)](*self._gradients[:3], squares, ROWS, COLUMNS, **_EXACT)
            _extremes_kernel[(len(extremes),)](*self._segments[:3], extremes, _BLOCK)
        return squares, extremes

    def launch_update(self, settings: tuple[float, ...], write: bool) -> Tensor:
        """Whether each block's new values are finite, if they are not written."""
        blocks = self._segments[3]
        numbers = torch.tensor(settings, dtype=torch.float64, device=self.device)
        finite = torch.empty(0 if write else blocks, dtype=torch.int32, device=self.device)
        if blocks:
            _update_kernel[(blocks,)](*self._segments[:3], numbers, finite, write, _BLOCK, **_EXACT)
        return finite

    def _table(self, rows: Sequence[tuple[int, ...]], step: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """Rows that end in a count; for each program its row; for each row its first program; programs."""
        table = torch.tensor(rows, dtype=torch.int64, device="cpu")
        programs = -(-table[:, -1] // step)
        firsts = programs.cumsum(0) - programs
        owners = torch.arange(len(rows), device="cpu").repeat_interleave(programs)
        return table.to(self.device), owners.to(self.device), firsts.to(self.device), len(owners)
