"""Bit-exact initial weights: the recipe of libstdc++'s `uniform_real_distribution<float>` over MT19937.

One 32-bit draw per value, in a fixed order of tensors; every rounding below is a float32 rounding of its own.
"""

import math

import numpy as np
import torch
from torch import Tensor

_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


class UniformStream:
    """Uniform float32 values from one MT19937 stream seeded as `init_genrand(seed)`."""

    def __init__(self, seed: int) -> None:
        self._mt19937 = np.random.RandomState(seed)

    def fill(self, tensor: Tensor, bound: np.float32) -> None:
        """Fill a float32 CPU tensor, row-major, with values in [-bound, bound)."""
        raw = self._mt19937.randint(0, 2**32, size=tensor.numel(), dtype=np.uint32)
        unit = np.minimum(raw.astype(np.float32) / np.float32(2**32), _BELOW_ONE)
        values = unit * (bound + bound) - bound
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(values).view(tensor.shape))


def embedding_bound(width: int) -> np.float32:
    """1 / sqrt(width) in float32."""
    return np.float32(1) / np.sqrt(np.float32(width))


def xavier_bound(fan_in: int, fan_out: int) -> np.float32:
    """sqrt(6 / (fan_in + fan_out)) (Glorot & Bengio 2010), the root in float64."""
    return np.float32(math.sqrt(6.0 / (fan_in + fan_out)))
