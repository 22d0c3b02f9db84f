"""The parts of the low-rank path in torch operations: its narrow products, and base products that it adds to.

What is narrow comes first in a product: on CPUs the other order takes up to ten times as long.
"""

from torch import Tensor

from kernels.linear import dense_backward, dense_forward
from kernels.nf4 import linear_backward, linear_forward
from kernels.nf4.packed import Weight
from kernels.operands import Operands


def narrow_product(x: Tensor, factors: Tensor, scale: float) -> Tensor:
    """scale x factors^T, contiguous `[n, rank]`; x `[n, width]`, factors `[rank, width]`."""
    return (factors @ x.T).T.contiguous().mul_(scale)


def narrow_gradient(left: Tensor, x: Tensor, scale: float) -> Tensor:
    """scale left^T x, `[rank, width]`; left `[n, rank]`, x `[n, width]`."""
    return (left.T @ x).mul_(scale)


def add_to_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    operands: Operands,
    left: Tensor,
    right: Tensor,
    scale: float,
) -> Tensor:
    """residual + x W^T + bias + scale left right."""
    y: Tensor = dense_forward(x, weight, bias, residual, operands)
    return y.addmm_(left, right, alpha=scale)


def add_to_gradient(
    upstream: Tensor, weight: Tensor, operands: Operands, left: Tensor, right: Tensor
) -> Tensor:
    """upstream W + left right."""
    found: list[Tensor] = dense_backward(upstream, upstream, weight, [True, False, False], operands)
    return found[0].addmm_(left, right)


def add_to_packed_product(
    x: Tensor,
    w: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    operands: Operands,
    left: Tensor,
    right: Tensor,
    scale: float,
) -> Tensor:
    """As `add_to_product`, W in 4 bits."""
    y: Tensor = linear_forward(x, w, bias, operands)
    y = y if residual is None else y.add_(residual)
    return y.addmm_(left, right, alpha=scale)


def add_to_packed_gradient(
    upstream: Tensor, w: Weight, operands: Operands, left: Tensor, right: Tensor
) -> Tensor:
    """As `add_to_gradient`, W in 4 bits."""
    found: Tensor = linear_backward(upstream, w, operands)
    return found.addmm_(left, right)
