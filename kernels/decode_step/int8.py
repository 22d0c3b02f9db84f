"""8-bit weights: whole numbers from -127 to 127, which in runs of 64 inputs share a scale."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.operands import ONE, RUN


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight `[out, in]`: numbers, int8 `[out, runs, RUN]`, times scales, float32 `[out, runs]`."""

    numbers: Tensor
    scales: Tensor
    shape: torch.Size

    @classmethod
    def quantize(cls, weight: Tensor) -> Self:
        """The nearest to a float32 weight, ties to even; inputs are padded with zeros to whole runs."""
        runs = pad(weight, (0, -weight.shape[1] % RUN)).unflatten(1, (-1, RUN))
        scales = runs.abs().amax(2) / ONE
        factors = (1 / scales).nan_to_num(posinf=0)  # 0 for a run of zeros
        # As one fused multiply-add rounds: the product is exact in float64.
        numbers = (runs.double() * factors[:, :, None].double()).round().to(torch.int8)
        return cls(numbers, scales, weight.shape)

    def dequantize(self) -> Tensor:
        """The weight as float32."""
        return (self.numbers * self.scales[:, :, None]).flatten(1)[:, : self.shape[1]]
