"""Causal self-attention over whole sequences.

`flash_attention` is torch's fused operator, which keeps no `[B, H, T, T]` matrix; `materialized_attention` is
the definition written out and keeps the probabilities for its backward. Both are differentiable and agree
within float32 rounding.
"""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.flash_attention.reference import causal_attention as materialized_attention

__all__ = ["flash_attention", "materialized_attention"]


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v with position i seeing j <= i; all `[B, H, T, d]`, one dtype and device."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)
