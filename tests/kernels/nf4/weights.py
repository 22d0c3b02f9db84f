"""What the tests of packing and of products share."""

import torch

from kernels.native import library
from kernels.nf4 import PackedNf4, quantize_nf4

FAST = ["torch", *(["native"] if library() else [])]
ALL = [*FAST, "triton"]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(one: PackedNf4, other: PackedNf4) -> bool:
    pairs = [(one.codes, other.codes), (one.scales, other.scales)]
    if one.group_scales is not None and other.group_scales is not None:
        pairs.append((one.group_scales, other.group_scales))
    kinds = (one.group_scales is None) == (other.group_scales is None)
    return kinds and one.offset == other.offset and all(torch.equal(a, b) for a, b in pairs)


def weights(columns: int, rows: int = 20) -> list[PackedNf4]:
    weight = normal(rows, columns, seed=1)
    return [
        quantize_nf4(weight, block, double, 32) for block, double in [(32, True), (64, False), (128, True)]
    ]
