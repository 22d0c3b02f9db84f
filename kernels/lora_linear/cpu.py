"""The parts of the low-rank path by the compiled CPU code, kernels/native/narrow.cpp and linear.cpp.

A base product adds an adapter's in its own pass.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.linear.cpu import covers, product
from kernels.native import Float, Integer, Pointer, function, library
from kernels.nf4 import panels
from kernels.nf4.cpu import FEW_ROWS, decode, multiplied
from kernels.nf4.packed import Weight
from kernels.operands import Operands

# Where our own narrow products were the faster ones; elsewhere torch's run.
_RANKS = (8, 16)
_FEWEST_ROWS = 256

_narrow_product = function(
    "riftco_narrow_product", Pointer, *[Integer] * 3, Pointer, Integer, Float, Pointer, Integer
)
_narrow_gradient = function(
    "riftco_narrow_gradient", Pointer, *[Integer] * 3, Pointer, Integer, Float, Pointer, Integer
)
_fast = _narrow_gradient is not None and library().riftco_lanes() == 16  # type: ignore[union-attr]


def narrow_product(x: Tensor, factors: Tensor, scale: float) -> Any:
    """As `reference.narrow_product`; NotImplemented where that takes no longer or x is not float32."""
    if not _covers(x, factors, len(factors)):
        return NotImplemented
    factors = factors.contiguous()
    out = x.new_empty(len(x), len(factors))
    numbers = (len(factors), scale, out.data_ptr(), torch.get_num_threads())
    _narrow_product(x.data_ptr(), *x.shape, x.stride(0), factors.data_ptr(), *numbers)  # type: ignore[misc]
    return out


def narrow_gradient(left: Tensor, x: Tensor, scale: float) -> Any:
    """As `reference.narrow_gradient`; NotImplemented as for `narrow_product`."""
    if not _covers(x, left, left.shape[1]):
        return NotImplemented
    left = left.contiguous()
    out = x.new_empty(left.shape[1], x.shape[1])
    numbers = (left.shape[1], scale, out.data_ptr(), torch.get_num_threads())
    _narrow_gradient(x.data_ptr(), *x.shape, x.stride(0), left.data_ptr(), *numbers)  # type: ignore[misc]
    return out


def _covers(x: Tensor, other: Tensor, rank: int) -> bool:
    """Whether these are float32, x in rows in one piece, and our own code is the faster one."""
    alike = x.dtype == other.dtype == torch.float32 and x.device.type == other.device.type == "cpu"
    fits = x.stride(1) == 1 and len(x) >= _FEWEST_ROWS and x.numel() > 0 and rank in _RANKS
    return _fast and alike and fits


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    operands: Operands,
    left: Tensor,
    right: Tensor,
    scale: float,
) -> Any:
    """As `reference.add_to_product`, for what `covers` covers."""
    if not covers(x, weight, bias, residual, left, operands=operands):
        return NotImplemented
    low = left, (right * scale).contiguous()
    return product(x, weight.t(), bias, start=residual, low=low, operands=operands)


def backward(upstream: Tensor, weight: Tensor, operands: Operands, left: Tensor, right: Tensor) -> Any:
    """As `reference.add_to_gradient`."""
    if not covers(upstream, weight, left, operands=operands):
        return NotImplemented
    return product(upstream, weight, low=(left, right.contiguous()), operands=operands)


def packed_forward(
    x: Tensor,
    w: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    operands: Operands,
    left: Tensor,
    right: Tensor,
    scale: float,
) -> Any:
    """As `reference.add_to_packed_product`, which decodes a weight for few rows in registers."""
    if len(x) <= FEW_ROWS:
        return NotImplemented
    multiply = multiplied(x, operands, bias, residual, (left, (right * scale).contiguous()))
    return NotImplemented if multiply is None else panels.forward(x, w, None, decode, multiply)


def packed_backward(upstream: Tensor, w: Weight, operands: Operands, left: Tensor, right: Tensor) -> Any:
    """As `reference.add_to_packed_gradient`."""
    multiply = multiplied(upstream, operands, low=(left, right.contiguous()))
    return NotImplemented if multiply is None else panels.backward(upstream, w, decode, multiply)
