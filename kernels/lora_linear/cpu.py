"""Products with a weight that add an adapter's in their own pass, by the compiled CPU code."""

from typing import Any

from torch import Tensor

from kernels.linear.cpu import covers, product
from kernels.nf4 import panels
from kernels.nf4.cpu import decode, multiplied
from kernels.nf4.packed import Weight


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
