"""The parts of the low-rank path by the compiled CPU code, kernels/native/narrow.cpp and linear.cpp.

A base product adds an adapter's in its own pass.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.linear.cpu import covers, product
from kernels.native import Float, Integer, Pointer, function
from kernels.nf4 import panels
from kernels.nf4.cpu import decode, multiplied
from kernels.nf4.packed import Weight

_RANKS = 8  # of which the compiled code takes a multiple

_narrow_product = function(
    "riftco_narrow_product", Pointer, *[Integer] * 3, Pointer, Integer, Float, Pointer, Integer
)
_narrow_gradient = function(
    "riftco_narrow_gradient", Pointer, *[Integer] * 3, Pointer, Integer, Float, Pointer, Integer
)


def narrow_product(x: Tensor, factors: Tensor, scale: float) -> Any:
    """As `reference.narrow_product`; NotImplemented for other than float32 rows in one piece."""
    if _narrow_product is None or not _covers(x, factors):
        return NotImplemented
    rank = len(factors)
    factors = (pad(factors, (0, 0, 0, -rank % _RANKS)) if rank % _RANKS else factors).contiguous()
    out = x.new_empty(len(x), len(factors))
    numbers = (len(factors), scale, out.data_ptr(), torch.get_num_threads())
    _narrow_product(x.data_ptr(), *x.shape, x.stride(0), factors.data_ptr(), *numbers)
    return out[:, :rank].contiguous()


def narrow_gradient(left: Tensor, x: Tensor, scale: float) -> Any:
    """As `reference.narrow_gradient`; NotImplemented where `narrow_product` gives it."""
    if _narrow_gradient is None or not _covers(x, left):
        return NotImplemented
    rank = left.shape[1]
    left = (pad(left, (0, -rank % _RANKS)) if rank % _RANKS else left).contiguous()
    out = x.new_empty(left.shape[1], x.shape[1])
    numbers = (left.shape[1], scale, out.data_ptr(), torch.get_num_threads())
    _narrow_gradient(x.data_ptr(), *x.shape, x.stride(0), left.data_ptr(), *numbers)
    return out[:rank]


def _covers(x: Tensor, other: Tensor) -> bool:
    alike = x.dtype == other.dtype == torch.float32 and x.device.type == other.device.type == "cpu"
    return alike and x.stride(1) == 1 and bool(x.numel() and other.numel())


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, half: bool, left: Tensor, right: Tensor, scale: float
) -> Any:
    """As `reference.add_to_product`, for what `covers` covers."""
    if not covers(x, weight, bias, left, half=half):
        return NotImplemented
    return product(x, weight.t(), bias, low=(left, (right * scale).contiguous()), fixed=half)


def backward(upstream: Tensor, weight: Tensor, half: bool, left: Tensor, right: Tensor) -> Any:
    """As `reference.add_to_gradient`."""
    if not covers(upstream, weight, left, half=half):
        return NotImplemented
    return product(upstream, weight, low=(left, right.contiguous()), fixed=half)


def packed_forward(
    x: Tensor, w: Weight, bias: Tensor | None, half: bool, left: Tensor, right: Tensor, scale: float
) -> Any:
    """As `reference.add_to_packed_product`."""
    multiply = multiplied(x, half, bias, (left, (right * scale).contiguous()))
    return NotImplemented if multiply is None else panels.forward(x, w, None, decode, multiply)


def packed_backward(upstream: Tensor, w: Weight, half: bool, left: Tensor, right: Tensor) -> Any:
    """As `reference.add_to_packed_gradient`."""
    multiply = multiplied(upstream, half, None, (left, right.contiguous()))
    return NotImplemented if multiply is None else panels.backward(upstream, w, decode, multiply)
