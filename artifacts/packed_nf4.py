"""NF4-packed linear weights, and `riftco-packed-nf4-v1`, the member of a checkpoint that holds them.

A weight is flattened row by row and cut into blocks; each block has a scale, each element a 4-bit code. The
scales are float32, or themselves quantised to 8 bits around an offset. The decoder accepts exactly what the
encoder writes of weights that keep these rules, and checks every length against the bytes that are there.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.arrays import FLOAT32, Bytes, Floats, read_only
from artifacts.checks import require_integer
from artifacts.errors import ArtifactError

_MAGIC = b"RTNF4S1\0"
_HEADER = struct.Struct("<8sQ")
_FIELDS = struct.Struct("<7Q4sI2Q")
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_ZERO_CODE = 7


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedScales:
    """Scales in 8 bits: `offset + scales[group] * (codes - 128) / 127`, groups of `block_size` codes."""

    codes: Bytes
    scales: Floats
    block_size: int
    offset: float

    def __post_init__(self) -> None:
        """Copy the arrays; raise TypeError or ArtifactError, code "packed", for what cannot be scales."""
        _require_block_size(self.block_size)
        object.__setattr__(self, "codes", _owned(self.codes, np.dtype(np.uint8)))
        object.__setattr__(self, "scales", _owned(self.scales, FLOAT32))
        object.__setattr__(self, "offset", float(np.float32(self.offset)))
        _require(
            len(self.scales) == -(-len(self.codes) // self.block_size), "has too many or few group scales"
        )
        _require(
            math.isfinite(self.offset) and self.offset >= 0,
            "has a scale offset that is negative or not finite",
        )
        _require_scales(self.scales)


@dataclass(frozen=True, slots=True, eq=False)
class PackedNf4Weight:
    """One packed weight [output, input] of n elements.

    `codes`: uint8 `[ceil(n / 2)]`, the element of an even flat index in the low half of its byte.
    `scales`: one per block of `block_size` elements, float32 `[ceil(n / block_size)]` or quantised.
    """

    shape: tuple[int, int]
    block_size: int
    codes: Bytes
    scales: Floats | QuantizedScales

    def __post_init__(self) -> None:
        """Copy the arrays; raise TypeError or ArtifactError, code "packed", for what cannot be a weight."""
        rows, columns = self.shape
        require_integer("rows of a packed weight", rows, 1, None)
        require_integer("columns of a packed weight", columns, 1, None)
        _require_block_size(self.block_size)
        object.__setattr__(self, "shape", (rows, columns))
        object.__setattr__(self, "codes", _owned(self.codes, np.dtype(np.uint8)))
        count = rows * columns
        _require(len(self.codes) == (count + 1) // 2, "has too many or few codes for its shape")
        _require(count % 2 == 0 or self.codes[-1] < 16, "has a code behind its last element")
        if not isinstance(self.scales, QuantizedScales):
            object.__setattr__(self, "scales", _owned(self.scales, FLOAT32))
        _require(len(self._block_scales) == -(-count // self.block_size), "has too many or few block scales")
        if self._block_scales.dtype == FLOAT32:
            _require_scales(self._block_scales)
            self._require_zero_blocks(count)

    @property
    def _block_scales(self) -> NDArray[Any]:
        return self.scales.codes if isinstance(self.scales, QuantizedScales) else self.scales

    def _require_zero_blocks(self, count: int) -> None:
        zero = self._block_scales == 0
        if zero.any():
            elements = np.stack([self.codes & 15, self.codes >> 4], axis=1).reshape(-1)[:count]
            of_zero_block = np.repeat(zero, self.block_size)[:count]
            _require(
                bool((elements[of_zero_block] == _ZERO_CODE).all()), "has values in a block of scale zero"
            )

    def encode(self) -> bytes:
        """This weight's part of the member."""
        nested = self.scales if isinstance(self.scales, QuantizedScales) else None
        fields = _FIELDS.pack(
            len(self.shape),
            self.block_size,
            len(self.codes),
            0 if nested else len(self._block_scales),
            len(nested.codes) if nested else 0,
            len(nested.scales) if nested else 0,
            nested.block_size if nested else 0,
            struct.pack("<f", nested.offset if nested else 0.0),
            1 if nested else 0,
            *self.shape,
        )
        arrays = [self.codes, *([nested.codes, nested.scales] if nested else [self._block_scales])]
        return fields + b"".join(array.tobytes() for array in arrays)


def encode_packed(weights: Sequence[PackedNf4Weight]) -> bytes:
    """The member that holds these weights."""
    return _HEADER.pack(_MAGIC, len(weights)) + b"".join(weight.encode() for weight in weights)


def decode_packed(data: bytes) -> tuple[PackedNf4Weight, ...]:
    """The weights in a member's bytes; ArtifactError, code "packed", unless they are canonical."""
    source = _Source(data)
    magic, count = source.unpack(_HEADER)
    _require(magic == _MAGIC, "does not begin with the magic of packed NF4 weights")
    _require(
        1 <= count <= source.remaining // _FIELDS.size, "declares no weights, or more than it has room for"
    )
    weights = tuple(_decode_weight(source) for _ in range(count))
    _require(source.remaining == 0, "has bytes behind its last weight")
    return weights


def _decode_weight(source: "_Source") -> PackedNf4Weight:
    fields = source.unpack(_FIELDS)
    rank, block_size, code_count, scale_count, nested_count, group_count, group_size, offset, flag, *shape = (
        fields
    )
    _require(rank == 2, "has a weight that is not a matrix")
    _require(flag <= 1, "has unknown flags")
    _require(min(shape) > 0, "has a weight without elements")
    if flag:
        _require(scale_count == 0, "has both kinds of scales")
    else:
        _require(not (nested_count or group_count or group_size or any(offset)), "has both kinds of scales")
    codes = source.array(code_count, np.dtype(np.uint8))
    scales: Floats | QuantizedScales
    if flag:
        nested_codes = source.array(nested_count, np.dtype(np.uint8))
        groups = source.array(group_count, FLOAT32)
        scales = QuantizedScales(nested_codes, groups, group_size, struct.unpack("<f", offset)[0])
    else:
        scales = source.array(scale_count, FLOAT32)
    return PackedNf4Weight((shape[0], shape[1]), block_size, codes, scales)


class _Source:
    """Bytes that are taken from the front; what is not there is refused before anything is allocated."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    @property
    def remaining(self) -> int:
        return len(self._data) - self._offset

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self._take(layout.size))

    def array(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _take(self, size: int) -> bytes:
        _require(size <= self.remaining, "ends inside a weight")
        self._offset += size
        return self._data[self._offset - size : self._offset]


def _owned(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    array = np.asarray(array)
    if array.dtype != dtype or array.ndim != 1:
        raise TypeError(f"an array of a packed weight must be flat {dtype}, got {array.dtype} {array.shape}")
    return read_only(array.copy())


def _require_block_size(size: int) -> None:
    _require(size in _BLOCK_SIZES, f"has a block size of {size}, none of {_BLOCK_SIZES}")


def _require_scales(scales: Floats) -> None:
    _require(
        bool(np.isfinite(scales).all() and (scales >= 0).all()), "has a scale that is negative or not finite"
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ArtifactError("packed", f"the packed NF4 state {message}")
