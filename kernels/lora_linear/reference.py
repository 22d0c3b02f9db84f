"""The low-rank path (Hu et al. 2021) around any base product, forward and backward, in torch operations.

The base product, forward and backward, is a fresh tensor that the low-rank products are added to as they are
computed, so that no product of full size is made only to be added.
"""

from collections.abc import Callable, Sequence

from torch import Tensor


def forward(x: Tensor, base: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """y = base + scale (x A^T) B^T, in place of base, and x A^T."""
    hidden = x @ lora_a.T
    return base.addmm_(hidden, lora_b.T, alpha=scale), hidden


def backward(
    upstream: Tensor,
    x: Tensor,
    hidden: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    base_gradient: Callable[[], Tensor],
    needed: Sequence[bool],
) -> list[Tensor]:
    """The needed gradients of x, weight, bias, A and B, in this order; everything is [n, width].

    base_gradient: gives upstream W.
    """
    for_x, for_weight, for_bias, for_a, for_b = needed
    gradients = []
    through = (upstream @ lora_b).mul_(scale) if for_x or for_a else upstream
    if for_x:
        gradients.append(base_gradient().addmm_(through, lora_a))
    if for_weight:
        gradients.append(upstream.T @ x)
    if for_bias:
        gradients.append(upstream.sum(0))
    if for_a:
        gradients.append(through.T @ x)
    if for_b:
        gradients.append((upstream.T @ hidden).mul_(scale))
    return gradients
