"""Orthogonalisation in torch: the definition, for every device and dtype."""

import math

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)  # drives singular values to about 1 in five steps, from 1e-2 on
STEPS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Products of all matrices together: one call in place of one for each."""
    a, b, c = QUINTIC
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if tall := x.shape[-2] > x.shape[-1]:
        x = x.mT
    shape, x = x.shape, x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(shape)
    return x.mT.contiguous() if tall else x
