"""Cross-entropy in Triton over logits `[N, V]`, forward and backward.

Grid: one program per row, on axis 0. Forward a program reads its row once, in blocks of BLOCK columns with
a running maximum and sum, and writes the loss, the maximum and the sum of exponentials. Backward it reads
the row once and writes its gradient, which may lie where the row lies. 4 operations and one exp per
element: bound by memory. Logits of any floating dtype up to float32, everything else in float32. A row that
does not count reads nothing and has loss 0 and gradient 0; a target outside the vocabulary gives NaN.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cross_entropy.chunks import Chunked
from kernels.cross_entropy.reference import divisor

BLOCK = 4096


@triton.jit
def _cross_entropy_forward_kernel(
    logits_ptr,
    targets_ptr,
    mask_ptr,
    loss_ptr,
    statistics_ptr,
    stride_lr: tl.int64,
    stride_lc: tl.int64,
    columns,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    seen = columns
    if HAS_MASK:
        seen = tl.where(tl.load(mask_ptr + r) != 0, columns, 0)
    row_ptr = logits_ptr + r * stride_lr
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for start in range(0, seen, BLOCK):
        c = start + tl.arange(0, BLOCK).to(tl.int64)
        value = tl.load(row_ptr + c * stride_lc, mask=c < columns, other=float("-inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(largest, tl.max(value, axis=0))
        origin = tl.where(largest == float("-inf"), 0.0, largest)
        total = total * tl.exp(before - origin) + tl.sum(tl.exp(value - origin), axis=0)
    largest = tl.where(seen > 0, largest, 0.0)
    total = tl.where(seen > 0, total, 1.0)
    target = tl.load(targets_ptr + r)
    valid = (target >= 0) & (target < columns)
    hit = tl.load(row_ptr + target * stride_lc, mask=valid & (seen > 0), other=0.0).to(tl.float32)
    loss = tl.where(valid, tl.log(total) - (hit - largest), float("nan"))
    tl.store(loss_ptr + r, tl.where(seen > 0, loss, 0.0))
    tl.store(statistics_ptr + 2 * r, largest)
    tl.store(statistics_ptr + 2 * r + 1, total)


@triton.jit
def _cross_entropy_backward_kernel(
    logits_ptr,
    targets_ptr,
    mask_ptr,
    statistics_ptr,
    coefficient_ptr,
    out_ptr,
    stride_lr: tl.int64,
    stride_lc: tl.int64,
    stride_or: tl.int64,
    columns,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    seen = columns
    if HAS_MASK:
        seen = tl.where(tl.load(mask_ptr + r) != 0, columns, 0)
    row_ptr = logits_ptr + r * stride_lr
    target = tl.load(targets_ptr + r)
    largest = tl.load(statistics_ptr + 2 * r)
    total = tl.load(statistics_ptr + 2 * r + 1)
    coefficient = tl.load(coefficient_ptr).to(tl.float32)
    coefficient = tl.where((target >= 0) & (target < columns), coefficient, float("nan"))
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK).to(tl.int64)
        value = tl.load(row_ptr + c * stride_lc, mask=c < seen, other=float("-inf")).to(tl.float32)
        gradient = (tl.exp(value - largest) / total - tl.where(c == target, 1.0, 0.0)) * coefficient
        gradient = tl.where(c < seen, gradient, 0.0)
        tl.store(out_ptr + r * stride_or + c, gradient.to(out_ptr.dtype.element_ty), mask=c < columns)


def forward(logits: Tensor, targets: Tensor, mask: Tensor | None, mean: bool) -> Any:
    """The loss, and each row's maximum and sum of exponentials, float32 `[N, 2]`; not for float64."""
    if logits.dtype == torch.float64:
        return NotImplemented
    losses, statistics = _launch_forward(logits, targets, mask)
    return (losses.sum(dtype=torch.float64) / divisor(targets, mask, mean)).float(), statistics


def backward(
    upstream: Tensor, logits: Tensor, targets: Tensor, mask: Tensor | None, statistics: Tensor, mean: bool
) -> Any:
    """As `kernels.cross_entropy.reference.backward`; NotImplemented for float64."""
    if logits.dtype == torch.float64:
        return NotImplemented
    out = logits.new_empty(logits.shape)
    _launch_backward(logits, targets, mask, statistics, upstream / divisor(targets, mask, mean), out)
    return out


def linear_cross_entropy(x: Tensor, *rest: Any) -> Any:
    """As `kernels.cross_entropy.chunks.Chunked`; NotImplemented for float64."""
    return NotImplemented if x.dtype == torch.float64 else _chunked(x, *rest)


def _rows(
    logits: Tensor, targets: Tensor, mask: Tensor | None, coefficient: Tensor | float, differentiate: bool
) -> Tensor:
    losses, statistics = _launch_forward(logits, targets, mask)
    if differentiate:
        factor = torch.as_tensor(coefficient, dtype=torch.float32, device=logits.device)
        _launch_backward(logits, targets, mask, statistics, factor, logits)
    return losses.to(torch.float64)


_chunked = Chunked(_rows)


def _launch_forward(logits: Tensor, targets: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, columns = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    statistics = logits.new_empty((rows, 2), dtype=torch.float32)
    if rows:
        _cross_entropy_forward_kernel[(rows,)](
            logits, targets.contiguous(), _bytes(mask), losses, statistics, *logits.stride(), columns,
            HAS_MASK=mask is not None, BLOCK=_block(columns), num_warps=8,
        )  # fmt: skip
    return losses, statistics


def _launch_backward(
    logits: Tensor, targets: Tensor, mask: Tensor | None, statistics: Tensor, coefficient: Tensor, out: Tensor
) -> None:
    """`out` may be the logits; its columns are adjacent."""
    rows, columns = logits.shape
    if rows:
        _cross_entropy_backward_kernel[(rows,)](
            logits, targets.contiguous(), _bytes(mask), statistics, coefficient.float(), out,
            *logits.stride(), out.stride(0), columns,
            HAS_MASK=mask is not None, BLOCK=_block(columns), num_warps=8,
        )  # fmt: skip


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def _block(columns: int) -> int:
    return min(BLOCK, triton.next_power_of_2(columns))
