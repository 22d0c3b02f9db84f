"""Cross-entropy by the compiled CPU code, kernels/native/cross_entropy.cpp."""

from typing import Any

import torch
from torch import Tensor

from kernels.cross_entropy.chunks import Chunked, TorchProducts
from kernels.cross_entropy.reference import divisor
from kernels.linear.cpu import covers, product
from kernels.native import Float, Integer, Pointer, function, pointer
from kernels.operands import Operands

_DTYPES = (torch.float32, torch.bfloat16)

_forward = function("riftco_cross_entropy_forward", *[Pointer] * 5, *[Integer] * 4)
_backward = function("riftco_cross_entropy_backward", *[Pointer] * 5, *[Integer] * 3, Float, Integer)
_in_place = function("riftco_cross_entropy_in_place", *[Pointer] * 3, *[Integer] * 5, Float, Integer)


def forward(logits: Tensor, targets: Tensor, mask: Tensor | None, mean: bool) -> Any:
    """The loss, and each row's maximum and sum of exponentials, float32 `[N, 2]`.

    NotImplemented for other than float32 and bfloat16, or without compiled code.
    """
    if _forward is None or logits.dtype not in _DTYPES:
        return NotImplemented
    losses = logits.new_empty(targets.shape, dtype=torch.float64)
    statistics = logits.new_empty((*targets.shape, 2), dtype=torch.float32)
    inputs = [logits.contiguous(), targets.contiguous(), None if mask is None else mask.contiguous()]
    half, threads = logits.dtype == torch.bfloat16, torch.get_num_threads()
    _forward(*map(pointer, [*inputs, losses, statistics]), half, *logits.shape, threads)
    return (losses.sum() / divisor(targets, mask, mean)).float(), statistics


def backward(
    upstream: Tensor, logits: Tensor, targets: Tensor, mask: Tensor | None, statistics: Tensor, mean: bool
) -> Any:
    """As `reference.backward`; NotImplemented where `forward` gives it."""
    if _backward is None or logits.dtype not in _DTYPES:
        return NotImplemented
    out = logits.new_empty(logits.shape)
    coefficient = float(upstream / divisor(targets, mask, mean))
    inputs = [logits.contiguous(), targets.contiguous(), None if mask is None else mask.contiguous()]
    half, threads = logits.dtype == torch.bfloat16, torch.get_num_threads()
    _backward(*map(pointer, [*inputs, statistics, out]), half, *logits.shape, coefficient, threads)
    return out


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    mask: Tensor | None,
    mean: bool,
    operands: Operands,
    *needed: bool,
) -> Any:
    """As `chunks.Chunked`, without any work for rows that do not count."""
    if _in_place is None or x.dtype not in _DTYPES:
        return NotImplemented
    chunked = Chunked(_rows, _NativeProducts)
    if mask is None:
        return chunked(x, weight, bias, targets, None, mean, operands, *needed)
    kept = mask.nonzero().squeeze(-1)
    loss, dx, *rest = chunked(x[kept], weight, bias, targets[kept], None, mean, operands, *needed)
    return loss, x.new_zeros(x.shape).index_copy_(0, kept, dx) if dx.dim() == 2 else dx, *rest


def _rows(
    logits: Tensor, targets: Tensor, mask: Tensor | None, coefficient: Tensor | float, differentiate: bool
) -> Tensor:
    """As `reference.in_place`, for rows of any stride that all count."""
    assert _in_place is not None
    losses = logits.new_empty(targets.shape, dtype=torch.float64)
    targets = targets.contiguous()
    half, threads = logits.dtype == torch.bfloat16, torch.get_num_threads()
    numbers = (half, *logits.shape, logits.stride(0), float(coefficient), threads)
    _in_place(*map(pointer, (logits, targets, losses)), differentiate, *numbers)
    return losses


class _NativeProducts(TorchProducts):
    """Our own where they run."""

    def logits(self, chunk: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, /) -> None:
        if covers(chunk, matrix, bias, operands=self.operands):
            product(chunk, matrix.t(), bias, out=out, operands=self.operands)
        else:
            super().logits(chunk, matrix, bias, out)

    def add_to_layer(self, gradient: Tensor, chunk: Tensor, dweight: Tensor, dbias: Tensor, /) -> None:
        if not covers(gradient, chunk, dweight, operands=self.operands):
            super().add_to_layer(gradient, chunk, dweight, dbias)
            return
        sums = torch.empty_like(dbias) if dbias.numel() else None
        product(gradient.t(), chunk, start=dweight, out=dweight, sums=sums, operands=self.operands)
        if sums is not None:
            dbias += sums

    def of_rows(self, gradient: Tensor, matrix: Tensor, out: Tensor, /) -> None:
        if covers(gradient, matrix, out, operands=self.operands):
            product(gradient, matrix, out=out, operands=self.operands)
        else:
            super().of_rows(gradient, matrix, out)
