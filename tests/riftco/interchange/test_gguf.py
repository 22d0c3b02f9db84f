"""GGUF: the original's bytes, the library that people use, and bytes of nobody."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import ModelBundle
from riftco.interchange import InterchangeError, export_model, load_model
from tests.support import FIXTURES

EDGE = (FIXTURES / "edge.gguf").read_bytes()
BUNDLE = ModelBundle.load(FIXTURES / "edge.rift")


def load(tmp_path, data: bytes) -> ModelBundle:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return load_model(path, format="gguf")


def test_the_original_would_have_written_the_same_bytes(tmp_path) -> None:
    assert export_model(BUNDLE, tmp_path / "m", format="gguf").read_bytes() == EDGE


def test_the_file_of_the_original_is_its_bundle(tmp_path) -> None:
    assert load(tmp_path, EDGE).to_bytes() == BUNDLE.to_bytes()


def test_the_name_is_for_people(tmp_path) -> None:
    path = export_model(BUNDLE, tmp_path / "m", format="gguf", gguf_model_name="Überschrift")
    assert load_model(path, format="gguf") == BUNDLE
    assert gguf.GGUFReader(path).fields["general.name"].contents() == "Überschrift"


@pytest.mark.parametrize("name", ["byte", "bpe", "edge"])
def test_the_library_reads_ours(name, tmp_path) -> None:
    bundle = ModelBundle.load(FIXTURES / f"{name}.rift")
    reader = gguf.GGUFReader(export_model(bundle, tmp_path / "m", format="gguf"))
    assert reader.fields["riftco.embedding_length"].contents() == bundle.config.model_width
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    assert list(found) == [spec.name for spec in bundle.parameters]
    for tensor_name, tensor in bundle.tensors().items():
        assert found[tensor_name].shape == tensor.shape
        assert np.array_equal(found[tensor_name], tensor)


def test_another_architecture_is_refused(tmp_path) -> None:
    path = tmp_path / "llama.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "b"])
    writer.add_array("llama.scores", [1.0, 2.0])
    writer.add_tensor("output.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InterchangeError, match=r"llama\.gguf: its architecture is 'llama': only models"):
        load_model(path, format="gguf")


def replaced(old: bytes, new: bytes) -> bytes:
    assert EDGE.count(old) >= 1
    return EDGE.replace(old, new, 1)


def key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


NAME = key("token_embedding.weight") + struct.pack("<IQQ", 2, 2, 4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends after 0 bytes"),
        (b"GGML" + EDGE[4:], "does not begin as GGUF files do"),
        (EDGE[:4] + struct.pack("<I", 2) + EDGE[8:], "GGUF version 2"),
        (EDGE[:4] + struct.pack(">I", 3) + EDGE[8:], "GGUF version 50331648"),
        (EDGE[:8] + struct.pack("<Q", 2**63) + EDGE[16:], "9223372036854775808 tensors, more than"),
        (EDGE[:16] + struct.pack("<Q", 2**40) + EDGE[24:], "1099511627776 fields, more than"),
        (EDGE[:24] + struct.pack("<Q", 2**60) + EDGE[32:], "ends after 3712 bytes, in its head"),
        (replaced(b"general.name\x08", b"general.name\x63"), "unknown type 99"),
        (
            replaced(b"general.name\x08\0\0\0\x0e", b"general.nama\x08\0\0\0\x0e"),
            "general.name must be a text",
        ),
        (replaced(b"riftco.activation", b"general.alignment"), "'general.alignment' occurs twice"),
        (replaced(key("riftco.stage"), key("riftco.stagy")), "lacks riftco.stage"),
        (replaced(NAME + struct.pack("<I", 0), NAME + struct.pack("<I", 2)), "unsupported tensor type 2"),
        (replaced(key("token_embedding.weight"), key("token_embedding.weighs")), "not those of its sizes"),
        (replaced(struct.pack("<IQQ", 2, 2, 4), struct.pack("<IQQ", 2, 4, 2)), "not those of an export"),
        (replaced(struct.pack("<IQQ", 2, 2, 4), struct.pack("<IQQ", 5, 2, 4)), "5 dimensions"),
        (replaced(b"pre_layer_norm", b"pre_layer_nurm"), "not those of an export"),
        (
            replaced(b"general.alignment\x04\0\0\0\x20", b"general.alignment\x04\0\0\0\x40"),
            "not those of an export",
        ),
        (replaced(b'"A":true,"b":null', b'"b":null,"A":true'), "not those of an export"),
        (EDGE + b"\0", "1 bytes follow its end"),
        (EDGE[:-32], "ends at byte 3696 of 3680"),
    ],
)
def test_other_bytes_are_refused(data, message, tmp_path) -> None:
    with pytest.raises(InterchangeError, match=message):
        load(tmp_path, data)


@pytest.mark.parametrize("length", range(0, len(EDGE), 7))
def test_a_file_that_ends_early_is_refused(length, tmp_path) -> None:
    with pytest.raises(InterchangeError, match=r"model\.gguf: "):
        load(tmp_path, EDGE[:length])


@settings(max_examples=400, deadline=None)
@given(st.integers(0, len(EDGE) - 1), st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_another_model(tmp_path_factory, at, bit) -> None:
    data = bytearray(EDGE)
    data[at] ^= 1 << bit
    folder = tmp_path_factory.mktemp("flipped")
    try:
        bundle = load(folder, bytes(data))
    except InterchangeError:
        return
    named = gguf.GGUFReader(folder / "model.gguf").fields["general.name"].contents()
    again = export_model(bundle, folder / "again", format="gguf", gguf_model_name=named)
    assert again.read_bytes() == bytes(data)
