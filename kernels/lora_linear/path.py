"""The low-rank path (Hu et al. 2021) around any base product, forward and backward.

The base product is a fresh tensor that the low-rank product is added to as it is computed, so that no product
of full size is made only to be added.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from kernels.dispatch import Operation
from kernels.lora_linear import cpu, reference

_narrow_product = Operation("narrow_product", torch=reference.narrow_product, native=cpu.narrow_product)
_narrow_gradient = Operation("narrow_gradient", torch=reference.narrow_gradient, native=cpu.narrow_gradient)


def forward(
    x: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float, base: Callable[[Tensor, Tensor, float], Tensor]
) -> tuple[Tensor, Tensor]:
    """y = base(hidden, B^T, scale), which is x W^T + bias + scale hidden B^T, and hidden = x A^T."""
    hidden = _narrow_product(x, lora_a, 1.0)
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
    through = _narrow_product(upstream, lora_b.T, scale) if for_x or for_a else upstream
    if for_x:
        gradients.append(base(through, lora_a))
    if for_weight:
        gradients.append(upstream.T @ x)
    if for_bias:
        gradients.append(upstream.sum(0))
    if for_a:
        gradients.append(_narrow_gradient(through, x, 1.0))
    if for_b:
        gradients.append(_narrow_gradient(hidden, upstream, scale).T.contiguous())
    return gradients
