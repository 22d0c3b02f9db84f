"""What the factors of a product become before they are multiplied."""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

Operands = Literal["full", "half", "int8"]
"""full: as they are. half: in bfloat16 where a device has units for it, on other CPUs what loses less. int8:
`in_bytes` along the summed index, which compiled code multiplies faster than the other two on CPUs with
AVX-512 VNNI; without compiled code they are multiplied as floats."""

AttentionOperands = Literal["full", "half"]
"""As above, but half is bfloat16 or nothing."""

RUN = 64  # numbers that share a scale, as in native/fixed.h
ONE = 127  # the largest whole number


def require_operands(operands: str) -> None:
    """ValueError for what is not one of `Operands`."""
    if operands not in get_args(Operands):
        raise ValueError(f"operands must be one of {', '.join(get_args(Operands))}, got {operands!r}")


def in_bytes(x: Tensor, axis: int) -> Tensor:
    """x rounded to whole numbers from -127 to 127 times a scale for each RUN neighbours along an axis.

    In x's dtype. A scale is the largest magnitude of its run over 127; a run with NaN or an infinity is NaN.
    """
    lines = x.movedim(axis, -1)
    count = lines.shape[-1]
    runs = functional.pad(lines, (0, -count % RUN)).unflatten(-1, (-1, RUN))
    scales = runs.abs().amax(-1, keepdim=True) / ONE
    whole = torch.where(scales == 0, 0.0, (runs / scales).round())
    return (whole * scales).flatten(-2)[..., :count].movedim(-1, axis)
