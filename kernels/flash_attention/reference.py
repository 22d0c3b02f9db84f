"""Causal attention as the formula reads (Vaswani et al. 2017), in any floating dtype."""

import math

import torch
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v with position i seeing j <= i; all `[B, H, T, d]`."""
    length, width = q.shape[-2:]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(width))
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
