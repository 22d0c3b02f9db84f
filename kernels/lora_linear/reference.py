"""The low-rank path (Hu et al. 2021) around any base product, forward and backward, in torch operations.

The base product, forward and backward, is a fresh tensor that the low-rank products are added to as they are
computed, so that no product of full size is made only to be added. What is narrow comes first in a product:
on CPUs the other order takes up to ten times as long.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from kernels.linear import dense_backward, dense_forward
from kernels.nf4 import linear_backward, linear_forward
from kernels.nf4.packed import Weight


def forward(
    x: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float, base: Callable[[Tensor, Tensor, float], Tensor]
) -> tuple[Tensor, Tensor]:
    """y = base(hidden, B^T, scale), which is x W^T + bias + scale hidden B^T, and hidden = x A^T."""
    hidden = (lora_a @ x.T).T.contiguous()
    return base(hidden, lora_b.T, scale), hidden


def backward(
    upstream: Tensor,
    x: Tensor,
    hidden: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    base: Callable[[Tensor, Tensor], Tensor],
    needed: Sequence[bool],
) -> list[Tensor]:
    """The needed gradients of x, weight, bias, A and B, in this order; everything is [n, width].

    base: (left, right) to upstream W + left right.
    """
    for_x, for_weight, for_bias, for_a, for_b = needed
    gradients = []
    through = (lora_b.T @ upstream.T).T.contiguous().mul_(scale) if for_x or for_a else upstream
    if for_x:
        gradients.append(base(through, lora_a))
    if for_weight:
        gradients.append(upstream.T @ x)
    if for_bias:
        gradients.append(upstream.sum(0))
    if for_a:
        gradients.append(through.T @ x)
    if for_b:
        gradients.append((hidden.T @ upstream).T.contiguous().mul_(scale))
    return gradients


def add_to_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, half: bool, left: Tensor, right: Tensor, scale: float
) -> Tensor:
    """x W^T + bias + scale left right."""
    y: Tensor = dense_forward(x, weight, bias, None, half)
    return y.addmm_(left, right, alpha=scale)


def add_to_gradient(upstream: Tensor, weight: Tensor, half: bool, left: Tensor, right: Tensor) -> Tensor:
    """upstream W + left right."""
    found: list[Tensor] = dense_backward(upstream, upstream, weight, [True, False, False], half)
    return found[0].addmm_(left, right)


def add_to_packed_product(
    x: Tensor, w: Weight, bias: Tensor | None, half: bool, left: Tensor, right: Tensor, scale: float
) -> Tensor:
    """As `add_to_product`, W in 4 bits."""
    y: Tensor = linear_forward(x, w, bias, half)
    return y.addmm_(left, right, alpha=scale)


def add_to_packed_gradient(upstream: Tensor, w: Weight, half: bool, left: Tensor, right: Tensor) -> Tensor:
    """As `add_to_gradient`, W in 4 bits."""
    found: Tensor = linear_backward(upstream, w, half)
    return found.addmm_(left, right)
