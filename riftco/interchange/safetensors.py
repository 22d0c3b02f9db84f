"""SafeTensors of float32: the bytes of a file, and what is in them.

A file is the length of its header (64 bits, little-endian), the header, JSON padded with spaces to a multiple
of 8, and the tensors' values. We write tensors by name, one right after the other, and canonical JSON, so
that equal content gives equal bytes.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from artifacts.arrays import FLOAT32, Floats
from artifacts.canonical_json import canonical_json, parse_json
from artifacts.checks import require_integer, require_keys
from riftco.interchange.errors import InterchangeError

_MAXIMUM_HEADER = 16 << 20  # bytes
_MAXIMUM_TENSORS = 8192
_METADATA = "__metadata__"


def encode(tensors: Mapping[str, Floats], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The bytes of a file, in pieces that share the tensors' memory."""
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset, ordered = 0, sorted(tensors.items())
    for name, tensor in ordered:
        end = offset + tensor.nbytes
        header[name] = {"data_offsets": [offset, end], "dtype": "F32", "shape": list(tensor.shape)}
        offset = end
    text = canonical_json(header)
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield np.ascontiguousarray(tensor, FLOAT32).reshape(-1).view(np.uint8).data


def decode(data: bytes) -> tuple[dict[str, Floats], dict[str, str]]:
    """Read-only tensors by name, and the metadata; InterchangeError, TypeError or ValueError for other bytes.

    Every byte must belong to exactly one tensor, and every value must be finite.
    """
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= min(_MAXIMUM_HEADER, len(data) - 8) or length % 8:
        raise InterchangeError("header", f"a header of {length} bytes in a file of {len(data)}")
    header = _header(data[8 : 8 + length])
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise InterchangeError("header", f"{_METADATA} must be an object of texts, got {metadata!r}")
    values, tensors, end = memoryview(data)[8 + length :], {}, 0
    described = {name: _described(name, entry) for name, entry in header.items()}
    for name, (shape, begin, stop) in sorted(described.items(), key=lambda item: item[1][1:]):
        if begin != end:
            raise InterchangeError("layout", f"{name}: begins at byte {begin}, the one before ends at {end}")
        if stop > len(values):
            raise InterchangeError("truncated", f"{name}: ends at byte {stop} of {len(values)}")
        tensors[name] = np.frombuffer(values[begin:stop], FLOAT32).reshape(shape)
        if not np.isfinite(tensors[name]).all():
            raise InterchangeError("not-finite", f"{name}: has NaN or an infinity")
        end = stop
    if end != len(values):
        raise InterchangeError("layout", f"{len(values) - end} bytes at the end belong to no tensor")
    return tensors, metadata


def _header(text: bytes) -> dict[str, Any]:
    if len(re.findall(rb'"data_offsets"', text)) > _MAXIMUM_TENSORS:  # before time goes into reading them
        raise InterchangeError("header", f"more than {_MAXIMUM_TENSORS} tensors")
    if not text.startswith(b"{") or not text.rstrip(b" ").endswith(b"}"):
        raise InterchangeError("header", "the header must be a JSON object, padded with spaces")
    header: dict[str, Any] = parse_json(text, what="the header")
    return header


def _described(name: str, entry: Any) -> tuple[tuple[int, ...], int, int]:
    """The shape, and where the values begin and end."""
    require_keys(name, entry, {"data_offsets", "dtype", "shape"})
    if entry["dtype"] != "F32":
        raise InterchangeError("dtype", f"{name}: unsupported dtype {entry['dtype']!r}; save it as F32")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise TypeError(f"{name}: shape and data_offsets must be arrays, the latter of two")
    for number in (*shape, *offsets):
        require_integer(f"{name}: a size or an offset", number, 0, 2**63 - 1)
    size = FLOAT32.itemsize * math.prod(shape)
    if offsets[1] - offsets[0] != size:
        raise InterchangeError("layout", f"{name}: {shape} takes {size} bytes, not those of {offsets}")
    return tuple(shape), offsets[0], offsets[1]
