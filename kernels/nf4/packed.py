"""A weight packed to 4 bits, and the sixteen values that a code can have."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CODE_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)

# A packed weight as the arguments of an operator, see Weight.
SCHEMA = (
    "Tensor codes, Tensor scales, Tensor? group_scales, float offset, "
    "SymInt rows, SymInt columns, int block_size, int scale_block_size"
)


class Weight(NamedTuple):
    """The fields of a PackedNf4, already checked, in the order of SCHEMA; scale_block_size 0 for none."""

    codes: Tensor
    scales: Tensor
    group_scales: Tensor | None
    offset: float
    rows: int
    columns: int
    block_size: int
    scale_block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedNf4:
    """A weight [rows, columns] of n elements, flattened row by row and cut into blocks that ignore rows.

    codes: uint8 `[ceil(n / 2)]`; the element of an even flat index in the low half of its byte.
    scales: one per block, float32, or uint8 codes of double quantisation: then a block's scale is
    `offset + group_scales[i // scale_block_size] * (scales[i] - 128) / 127`, at least 0.
    """

    codes: Tensor
    scales: Tensor
    shape: tuple[int, int]
    block_size: int
    group_scales: Tensor | None = None
    offset: float = 0.0
    scale_block_size: int | None = None

    def __post_init__(self) -> None:
        """ValueError unless every array has the dtype and length that the shape asks for, on one device."""
        rows, columns = self.shape
        if rows < 1 or columns < 1:
            raise ValueError(f"the shape must have elements, got {list(self.shape)}")
        count = rows * columns
        blocks = -(-count // require_block_size("block_size", self.block_size))
        _require("codes", self.codes, torch.uint8, -(-count // 2), self.codes.device)
        double = self.scale_block_size is not None
        _require("scales", self.scales, torch.uint8 if double else torch.float32, blocks, self.codes.device)
        if (self.group_scales is not None) != double:
            raise ValueError("group_scales and scale_block_size belong together: give both or neither")
        if self.scale_block_size is not None and self.group_scales is not None:
            groups = -(-blocks // require_block_size("scale_block_size", self.scale_block_size))
            _require("group_scales", self.group_scales, torch.float32, groups, self.codes.device)

    def to(self, device: torch.device | str) -> "PackedNf4":
        """The same weight on a device."""
        groups = None if self.group_scales is None else self.group_scales.to(device)
        codes, scales = self.codes.to(device), self.scales.to(device)
        return PackedNf4(
            codes, scales, self.shape, self.block_size, groups, self.offset, self.scale_block_size
        )

    def fields(self) -> Weight:
        """As the operators take it."""
        sizes = (self.block_size, self.scale_block_size or 0)
        return Weight(self.codes, self.scales, self.group_scales, self.offset, *self.shape, *sizes)


def require_block_size(name: str, size: int) -> int:
    """The size; ValueError if it is none of the format's."""
    if size not in BLOCK_SIZES:
        raise ValueError(f"{name} {size} is not supported: use one of {BLOCK_SIZES}")
    return size


def _require(name: str, array: Tensor, dtype: torch.dtype, length: int, device: torch.device) -> None:
    if array.dtype != dtype or array.shape != (length,) or array.device != device:
        raise ValueError(
            f"{name} must be {dtype} [{length}] on {device}, got {array.dtype} {list(array.shape)} on "
            f"{array.device}: pack the weight with quantize_nf4"
        )
    if not array.is_contiguous():
        raise ValueError(f"{name} must be contiguous: call .contiguous()")
