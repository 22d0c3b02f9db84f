"""GELU by the compiled CPU code, kernels/native/gelu.cpp."""

from typing import Any

import torch
from torch import Tensor

from kernels.native import Integer, Pointer, function, pointer

PARTS = 64  # of the rows, each with its own sum of the bias gradient: fixed, so that threads do not show

_forward = function("riftco_gelu_forward", *[Pointer] * 3, *[Integer] * 4)
_backward = function("riftco_gelu_backward", *[Pointer] * 5, *[Integer] * 5)


def forward(x: Tensor, bias: Tensor | None) -> Any:
    """As `reference.forward`; NotImplemented but for float32 and bfloat16, or without compiled code."""
    if _forward is None or x.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    out = x.new_empty(x.shape)
    rows, width = _two_axes(x)
    x, bias = x.contiguous(), _prepared(bias)
    half, threads = x.dtype == torch.bfloat16, torch.get_num_threads()
    if x.numel():
        _forward(pointer(x), pointer(bias), pointer(out), half, rows, width, threads)
    return out


def backward(gradient: Tensor, x: Tensor, bias: Tensor | None) -> Any:
    """As `reference.backward`; NotImplemented where `forward` gives it."""
    if _backward is None or x.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    dx = x.new_empty(x.shape)
    rows, width = _two_axes(x)
    parts = min(PARTS, rows)
    partial = x.new_empty((parts if bias is not None else 0, width), dtype=torch.float32)
    shift = _prepared(bias)
    gradient, x = gradient.to(x.dtype).contiguous(), x.contiguous()
    half, threads = x.dtype == torch.bfloat16, torch.get_num_threads()
    if x.numel():
        arguments = (gradient, x, shift, dx, partial)
        _backward(*map(pointer, arguments), half, parts, rows, width, threads)
    return dx, x.new_empty(0) if bias is None else partial.sum(0).to(bias.dtype)


def _two_axes(x: Tensor) -> tuple[int, int]:
    width = x.shape[-1] if x.dim() else 1
    return x.numel() // max(width, 1), width


def _prepared(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()
