"""SafeTensors: our bytes, those of the library that people use, and bytes of nobody."""

import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from artifacts import ArtifactError
from riftco.interchange.safetensors import decode, encode

TENSORS = {
    "b": np.arange(6, dtype="<f4").reshape(2, 3),
    "a": np.array(0.5, "<f4"),
    "c": np.zeros((0, 2), "<f4"),
}


def encoded(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    return b"".join(encode(tensors, metadata or {}))


def forged(header: Any, values: bytes = b"", *, text: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if text is None else text
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + values


def entry(begin: int, end: int, shape: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_what_is_written_is_read() -> None:
    tensors, metadata = decode(encoded(TENSORS, {"x": "é"}))
    assert metadata == {"x": "é"}
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].shape == tensor.shape
        assert np.array_equal(tensors[name], tensor)
        assert not tensors[name].flags.writeable


def test_the_library_reads_ours(tmp_path) -> None:
    path = tmp_path / "ours.safetensors"
    path.write_bytes(encoded(TENSORS, {"x": "y"}))
    found = safetensors.numpy.load_file(path)
    assert found.keys() == TENSORS.keys()
    assert all(np.array_equal(found[name], TENSORS[name]) for name in TENSORS)


def test_we_read_what_the_library_writes() -> None:
    tensors, metadata = decode(safetensors.numpy.save(TENSORS, {"x": "y"}))
    assert metadata == {"x": "y"}
    assert all(np.array_equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_tensors_lie_by_name_and_as_numbers_do() -> None:
    data = encoded({"b": TENSORS["b"].T, "a": TENSORS["a"]})
    assert data.endswith(struct.pack("<7f", 0.5, 0, 3, 1, 4, 2, 5))
    length = struct.unpack("<Q", data[:8])[0]
    assert length % 8 == 0
    header = data[8 : 8 + length].rstrip(b" ")
    assert header.startswith(b'{"a":{"data_offsets":[0,4],"dtype":"F32","shape":[]},"b":')


ONE = np.ones(1, "<f4").tobytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a header of 0 bytes in a file of 0"),
        (struct.pack("<Q", 0), "a header of 0 bytes"),
        (struct.pack("<Q", 16) + b"{}      ", "a header of 16 bytes in a file of 16"),
        (struct.pack("<Q", 2**63) + b"{}      ", "a header of 9223372036854775808"),
        (struct.pack("<Q", 7) + b"{}     ", "a header of 7 bytes"),
        (struct.pack("<Q", (16 << 20) + 8) + b"{" + b" " * ((16 << 20) + 7), "a header of 16777224"),
        (forged(None, text=b" {}"), "must be a JSON object, padded with spaces"),
        (forged(None, text=b"{}\n"), "padded with spaces"),
        (forged([]), "must be a JSON object"),
        (forged(None, text=b'{"a":1,"a":1}'), "'a' occurs twice"),
        (forged(None, text=b'{"a":NaN}'), "NaN is not a JSON number"),
        (forged(None, text=b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "not strict JSON"),
        (forged({"a": 1}), "a must be an object"),
        (forged({"a": {"dtype": "F32", "shape": [1]}}), "must have exactly the keys"),
        (forged({"a": entry(0, 4, [1]) | {"more": 1}}, ONE), "must have exactly the keys"),
        (forged({"a": entry(0, 2, [1], "F16")}, ONE), "a: unsupported dtype 'F16'"),
        (forged({"a": entry(0, 4, 1)}, ONE), "must be arrays"),
        (forged({"a": entry(0, 4, [1]) | {"data_offsets": [0]}}, ONE), "must be arrays, the latter of two"),
        (forged({"a": entry(0, 4, [True])}, ONE), "must be an integer, got True"),
        (forged({"a": entry(0, 4, [1.0])}, ONE), "must be an integer, got 1.0"),
        (forged({"a": entry(0, 4, [-1])}, ONE), "must be between 0"),
        (forged({"a": entry(0, 8, [1])}, 2 * ONE), "takes 4 bytes"),
        (forged({"a": entry(0, 4, [2**62, 2**62])}, ONE), "takes .* bytes"),
        (forged({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, ONE), "begins at byte 0, .* ends at 4"),
        (forged({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, 3 * ONE), "begins at byte 8"),
        (forged({"a": entry(4, 8, [1])}, 2 * ONE), "begins at byte 4"),
        (forged({"a": entry(0, 4, [1])}, 2 * ONE), "4 bytes at the end belong to no tensor"),
        (forged({"a": entry(0, 8, [2])}, ONE), "ends at byte 8 of 4"),
        (forged({"a": entry(0, 4, [1])}, struct.pack("<f", np.nan)), "a: has NaN or an infinity"),
        (forged({"a": entry(0, 4, [1])}, struct.pack("<f", -np.inf)), "a: has NaN or an infinity"),
        (forged({"__metadata__": {"a": 1}}), "must be an object of texts"),
        (forged({"__metadata__": []}), "must be an object of texts"),
        (forged({f"{i}": entry(0, 0, [0]) for i in range(8193)}), "more than 8192 tensors"),
    ],
)
def test_other_bytes_are_refused(data, message) -> None:
    with pytest.raises((ArtifactError, TypeError, ValueError), match=message):
        decode(data)


@given(st.data())
def test_a_damaged_file_is_refused_or_says_the_same(data) -> None:
    whole = encoded(TENSORS)
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    if damaged and data.draw(st.booleans()):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        tensors, metadata = decode(bytes(damaged))
    except (ArtifactError, TypeError, ValueError):
        return
    assert b"".join(encode(tensors, metadata))  # whatever it says, it is tensors
