"""GELU written out in torch: the definition, for every device and dtype."""

import math

import torch
from torch import Tensor


def forward(x: Tensor, bias: Tensor | None) -> Tensor:
    """z Phi(z) of z = x + bias, computed in float32, or float64 for float64; like x."""
    z = _shifted(x, bias)
    return (0.5 * z * (1 + torch.erf(z * math.sqrt(0.5)))).to(x.dtype)


def backward(gradient: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """dx, and its sum over all axes but the last like the bias; an empty tensor without one."""
    z = _shifted(x, bias)
    probability = 0.5 * (1 + torch.erf(z * math.sqrt(0.5)))
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    dx = gradient.to(z.dtype).contiguous() * (probability + z * density)
    sums = x.new_empty(0) if bias is None else dx.flatten(0, -2).sum(0) if dx.dim() > 1 else dx.clone()
    return dx.to(x.dtype), sums if bias is None else sums.to(bias.dtype)


def _shifted(x: Tensor, bias: Tensor | None) -> Tensor:
    x = x.contiguous()  # so that the results are
    wide = x if x.dtype == torch.float64 else x.float()
    return wide if bias is None else wide + bias.to(wide.dtype)
