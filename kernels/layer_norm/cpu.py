"""Layer norm by the compiled CPU code, kernels/native/layer_norm.cpp."""

from typing import Any

import torch
from torch import Tensor

from kernels.native import Float, Integer, Pointer, function, pointer

PARTS = 64  # of the rows, each with its own parameter gradients: fixed, so that threads do not show

_forward = function("riftco_layer_norm_forward", *[Pointer] * 8, *[Integer] * 3, Float, Integer)
_backward = function("riftco_layer_norm_backward", *[Pointer] * 8, *[Integer] * 5)


def forward(x: Tensor, residual: Tensor | None, scale: Tensor, bias: Tensor, epsilon: float) -> Any:
    """As `reference.forward`; NotImplemented but for float32 and bfloat16, or without compiled code."""
    if _forward is None or x.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    normed, total = x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape)
    rows, width = x.shape[:-1].numel(), x.shape[-1]
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    inputs = [
        x.contiguous(),
        None if residual is None else residual.contiguous(),
        scale.float().contiguous(),
        bias.float().contiguous(),
    ]
    half, threads = x.dtype == torch.bfloat16, torch.get_num_threads()
    _forward(*map(pointer, [*inputs, normed, total, mean, rstd]), half, rows, width, epsilon, threads)
    return normed, total, mean, rstd


def backward(
    gradient: Tensor,
    sum_gradient: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor,
    bias: Tensor,
) -> Any:
    """As `reference.backward`; NotImplemented where `forward` gives it."""
    if _backward is None or total.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    dx = total.new_empty(total.shape)
    rows, width = mean.numel(), total.shape[-1]
    parts = min(PARTS, rows)
    partial = total.new_empty((parts, 2, width), dtype=torch.float32)
    inputs = [
        gradient.contiguous(),
        None if sum_gradient is None else sum_gradient.contiguous(),
        total.contiguous(),
        scale.float().contiguous(),
    ]
    half, threads = total.dtype == torch.bfloat16, torch.get_num_threads()
    _backward(*map(pointer, [*inputs, mean, rstd, dx, partial]), half, parts, rows, width, threads)
    dscale, dbias = partial.sum(0)
    return dx, dscale.to(scale.dtype, copy=True), dbias.to(bias.dtype, copy=True)
