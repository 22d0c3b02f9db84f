"""The strict reader: every change to a bundle's bytes is refused, with a code that says what is wrong."""

import functools
import hashlib
import json
import struct
import tracemalloc
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import BundleError, ModelBundle
from artifacts.bundle_manifest import BundleManifest
from tests.artifacts.bundles import (
    EDGE,
    float32,
    identified,
    manifest_of,
    spell,
    weights_of,
    zipped,
    zipped_entries,
)

MANIFEST, WEIGHTS = manifest_of(EDGE), weights_of(EDGE)


def refusal(data: bytes) -> BundleError:
    with pytest.raises(BundleError) as caught:
        ModelBundle.from_bytes(data)
    return caught.value


def test_every_flipped_bit_is_refused(monkeypatch):
    decode = functools.cache(BundleManifest.decode)  # a function of the bytes alone; 4,000 flips spare it
    monkeypatch.setattr(BundleManifest, "decode", decode)
    data = bytearray(EDGE)
    accepted = []
    for position in range(8 * len(data)):
        data[position // 8] ^= 1 << position % 8
        try:
            ModelBundle.from_bytes(bytes(data))
        except BundleError:
            pass
        else:
            accepted.append(position)
        data[position // 8] ^= 1 << position % 8
    assert accepted == []


def test_flipped_bits_of_the_manifest_are_refused_even_with_matching_checksums():
    data = bytearray(spell(MANIFEST))
    for position in range(0, 8 * len(data), 29):
        data[position // 8] ^= 1 << position % 8
        assert refusal(zipped(bytes(data), WEIGHTS)).code not in ("container", "checksum", "truncated")
        data[position // 8] ^= 1 << position % 8


@given(st.integers(0, len(EDGE) - 1))
def test_every_shorter_file_is_refused(length):
    assert refusal(EDGE[:length]).code == "truncated"


@given(st.binary(min_size=1, max_size=64))
def test_bytes_behind_or_before_a_bundle_are_refused(extra):
    assert refusal(EDGE + extra).code == "trailing-bytes"
    assert refusal(extra + EDGE).code in ("not-zip", "container", "manifest-size", "truncated")


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data):
    refusal(data)
    refusal(b"PK\x03\x04" + data)


def patched(offset: int, data: bytes) -> bytes:
    return EDGE[:offset] + data + EDGE[offset + len(data) :]


M = len(spell(MANIFEST))
WEIGHTS_HEADER = 43 + M
DIRECTORY = WEIGHTS_HEADER + 43 + len(WEIGHTS)
BEHIND = len(EDGE)

CONTAINERS = [
    ("another date", zipped(spell(MANIFEST), WEIGHTS, date_time=(2024, 5, 6, 7, 8, 10)), "container", "time"),
    ("made on unix", zipped(spell(MANIFEST), WEIGHTS, create_system=3), "container", "made by"),
    ("a symlink", zipped(spell(MANIFEST), WEIGHTS, external_attr=0o120777 << 16), "container", "external"),
    (
        "compressed",
        zipped(spell(MANIFEST), WEIGHTS, compress_type=zipfile.ZIP_DEFLATED),
        "container",
        "method",
    ),
    ("an entry comment", zipped(spell(MANIFEST), WEIGHTS, comment=b"hello"), "trailing-bytes", "comment"),
    ("an extra field", zipped(spell(MANIFEST), WEIGHTS, extra=b"\x99\x99\0\0"), "container", "differs"),
    ("an archive comment", EDGE[:-2] + b"\x05\x00hello", "trailing-bytes", "comment"),
    ("a comment length without one", EDGE[:-2] + b"\x05\x00", "container", "archive comment"),
    (
        "a third entry",
        zipped_entries([("manifest.json", spell(MANIFEST)), ("weights.f32le", WEIGHTS), ("x", b"")]),
        "trailing-bytes",
        "too many",
    ),
    (
        "the same entry twice",
        zipped_entries([("manifest.json", spell(MANIFEST)), *[("weights.f32le", WEIGHTS)] * 2]),
        "trailing-bytes",
        "too many",
    ),
    (
        "swapped entries",
        zipped_entries([("weights.f32le", WEIGHTS), ("manifest.json", spell(MANIFEST))]),
        "container",
        "name",
    ),
    (
        "a path as name",
        zipped_entries([("../manifest.j", spell(MANIFEST)), ("weights.f32le", WEIGHTS)]),
        "container",
        "name",
    ),
    ("no weights", zipped_entries([("manifest.json", spell(MANIFEST))]), "truncated", "asks for"),
    ("an empty archive", zipped_entries([]), "truncated", "header"),
    ("a forged CRC of the manifest", patched(14, b"\0\0\0\0"), "container", "CRC-32 of manifest"),
    ("a huge manifest size", patched(18, b"\xff\xff\xff\x7f" * 2), "manifest-size", "1 MiB"),
    ("a manifest size of 4 GiB", patched(18, b"\xff" * 8), "manifest-size", "1 MiB"),
    (
        "a manifest beyond the file",
        patched(18, struct.pack("<II", 900_000, 900_000)),
        "truncated",
        "manifest",
    ),
    (
        "a forged size of the weights",
        patched(WEIGHTS_HEADER + 18, b"\xff" * 8),
        "container",
        "sizes of weights",
    ),
    (
        "a forged CRC of the weights",
        patched(WEIGHTS_HEADER + 14, b"\0" * 4),
        "container",
        "CRC-32 of weights",
    ),
    ("flags", patched(6, b"\0\x08"), "container", "flags"),
    (
        "an overlapping entry",
        patched(DIRECTORY + 42, b"\x01"),
        "container",
        "local header offset of manifest",
    ),
    ("another entry count", patched(BEHIND - 14, b"\x03"), "container", "entry counts"),
    ("another directory offset", patched(BEHIND - 6, b"\0\0\0\0"), "container", "directory offset"),
]


@pytest.mark.parametrize(
    ("data", "code", "message"), [c[1:] for c in CONTAINERS], ids=[c[0] for c in CONTAINERS]
)
def test_another_container_of_the_same_content_is_refused(data, code, message):
    error = refusal(data)
    assert (error.code, message in str(error)) == (code, True), str(error)


@pytest.mark.parametrize("count", [2**20, 2**62, 2**64, 10**309, 10**4000])
def test_a_forged_count_allocates_nothing(count):
    manifest = identified(
        MANIFEST
        | {"parameters": [{"name": "w", "shape": [count], "offset": 0, "count": count}]}
        | {"weights": MANIFEST["weights"] | {"count": count}}
    )
    data = zipped(spell(manifest), WEIGHTS)
    tracemalloc.start()
    assert refusal(data).code == "truncated"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_shape_whose_product_is_astronomical_is_refused():
    shape = [10**4000, 10**4000, 10**4000]
    manifest = MANIFEST | {"parameters": [{"name": "w", "shape": shape, "offset": 0, "count": 79}]}
    assert refusal(zipped(spell(identified(manifest)), WEIGHTS)).code in ("parameters", "manifest")


@pytest.mark.parametrize("key", ["format", "format_version", "artifact_id", "stage"])
def test_a_value_nested_almost_too_deep_is_refused_without_a_crash(key):
    old = b'"%s":%s' % (key.encode(), spell(MANIFEST[key]))
    assert old in spell(MANIFEST)
    for depth in [50, *range(900, 1000, 3)]:
        deep = b'"%s":' % key.encode() + b"[" * depth + b"]" * depth
        refusal(zipped(spell(MANIFEST).replace(old, deep), WEIGHTS))


def changed(**changes) -> bytes:
    """A bundle whose manifest has other content and the id that belongs to it."""
    return zipped(spell(identified(MANIFEST | changes)), WEIGHTS)


def without(key: str) -> bytes:
    return zipped(spell(identified({k: v for k, v in MANIFEST.items() if k != key})), WEIGHTS)


def config(**changes) -> bytes:
    return changed(config=MANIFEST["config"] | changes)


def weights(**changes) -> bytes:
    return changed(weights=MANIFEST["weights"] | changes)


def first_parameter(**changes) -> bytes:
    first, *rest = MANIFEST["parameters"]
    return changed(parameters=[first | changes, *rest])


MANIFESTS = [
    ("another format", changed(format="other"), "format"),
    ("a later version", changed(format_version=2), "format"),
    ("a true version", changed(format_version=True), "format"),
    ("a float version", changed(format_version=1.0), "format"),
    ("an unknown key", changed(extra=1), "manifest"),
    *((f"no {key}", without(key), "manifest") for key in sorted(MANIFEST) if key != "artifact_id"),
    ("no id", zipped(spell({k: v for k, v in MANIFEST.items() if k != "artifact_id"}), WEIGHTS), "manifest"),
    ("another id", zipped(spell(MANIFEST | {"artifact_id": "0" * 64}), WEIGHTS), "id"),
    ("a null id", zipped(spell(MANIFEST | {"artifact_id": None}), WEIGHTS), "id"),
    ("an array", zipped(b"[]", WEIGHTS), "manifest"),
    ("nothing", zipped(b"", WEIGHTS), "json"),
    ("no JSON", zipped(b"{", WEIGHTS), "json"),
    ("a byte order mark", zipped(b"\xef\xbb\xbf" + spell(MANIFEST), WEIGHTS), "json"),
    ("UTF-16", zipped(spell(MANIFEST).decode().encode("utf-16"), WEIGHTS), "json"),
    ("a newline at the end", zipped(spell(MANIFEST) + b"\n", WEIGHTS), "not-canonical"),
    (
        "pretty printing",
        zipped(json.dumps(MANIFEST, indent=1, sort_keys=True).encode(), WEIGHTS),
        "not-canonical",
    ),
    ("escapes", zipped(json.dumps(MANIFEST, sort_keys=True).encode(), WEIGHTS), "not-canonical"),
    ("another order", zipped(spell(MANIFEST)[:-1] + b',"a":0}', WEIGHTS), "manifest"),
    (
        "a key twice",
        zipped(spell(MANIFEST).replace(b'{"artifact_id"', b'{"stage":"x","artifact_id"', 1), WEIGHTS),
        "json",
    ),
    (
        "a key twice in metadata",
        zipped(spell(MANIFEST).replace(b'"A":true', b'"A":true,"A":true'), WEIGHTS),
        "json",
    ),
    ("NaN in metadata", zipped(spell(MANIFEST).replace(b"0.1,", b"NaN,"), WEIGHTS), "json"),
    ("infinity in metadata", zipped(spell(MANIFEST).replace(b"1e+22", b"1e+999"), WEIGHTS), "json"),
    (
        "a number spelled otherwise",
        zipped(spell(MANIFEST).replace(b"1e+22", b"1E22"), WEIGHTS),
        "not-canonical",
    ),
    ("metadata that is an array", changed(metadata=[]), "manifest"),
    ("null metadata", changed(metadata=None), "manifest"),
    ("a blank stage", changed(stage=" "), "stage"),
    ("a number as stage", changed(stage=1), "manifest"),
    ("an upper-case parent", changed(parent_artifact_id="A" * 64), "parent"),
    ("a short parent", changed(parent_artifact_id="ab"), "parent"),
    ("an integer epsilon", config(layer_norm_epsilon=1), "manifest"),
    ("a tiny epsilon", config(layer_norm_epsilon=1e-60), "manifest"),
    ("a true block count", config(block_count=True), "manifest"),
    ("a float width", config(model_width=2.0), "manifest"),
    ("a zero context", config(maximum_context=0), "manifest"),
    ("a seed too large", config(random_seed=2**32), "manifest"),
    ("a config key too many", config(dropout=0.0), "manifest"),
    ("another vocabulary size", config(vocabulary_size=5), "vocabulary"),
    ("no tokenizer", changed(tokenizer=None), "manifest"),
    ("an unknown tokenizer", changed(tokenizer={"method": "word", "byte_vocabulary": [1]}), "manifest"),
    ("both tokenizers", changed(tokenizer=MANIFEST["tokenizer"] | {"merge_rules": []}), "manifest"),
    ("a true byte", changed(tokenizer={"method": "byte", "byte_vocabulary": [True, 0, 2, 3]}), "manifest"),
    ("no parameters", changed(parameters=[]), "parameters"),
    ("parameters as an object", changed(parameters={}), "manifest"),
    ("a parameter that is a text", changed(parameters=["w"]), "manifest"),
    ("an unnamed parameter", first_parameter(name=""), "manifest"),
    ("a parameter name that is a number", first_parameter(name=3), "manifest"),
    ("a parameter name twice", first_parameter(name="final_norm.bias"), "parameters"),
    ("a shape that is a text", first_parameter(shape="ab"), "manifest"),
    ("a zero dimension", first_parameter(shape=[0, 2], count=0), "manifest"),
    ("a true dimension", first_parameter(shape=[8, True]), "manifest"),
    ("another shape", first_parameter(shape=[4, 3]), "parameters"),
    ("another count", first_parameter(count=9), "parameters"),
    ("another offset", first_parameter(offset=1), "parameters"),
    ("a float offset", first_parameter(offset=0.0), "id"),
    ("a false offset", first_parameter(offset=False), "id"),
    ("a parameter key too many", first_parameter(dtype="float32"), "parameters"),
    ("weights as an array", changed(weights=[]), "manifest"),
    ("another weights file", weights(file="../weights.f32le"), "weights"),
    ("another dtype", weights(dtype="float16"), "weights"),
    ("another byte order", weights(byte_order="big"), "weights"),
    ("another weight count", weights(count=78), "weights"),
    ("a float weight count", weights(count=79.0), "id"),
    ("another weights hash", weights(sha256="0" * 64), "checksum"),
    ("an upper-case weights hash", weights(sha256=MANIFEST["weights"]["sha256"].upper()), "manifest"),
    ("a weights key too many", weights(size=316), "weights"),
    ("a manifest over 1 MiB", changed(metadata={"x": "y" * 1_048_576}), "manifest-size"),
]


@pytest.mark.parametrize(("data", "code"), [m[1:] for m in MANIFESTS], ids=[m[0] for m in MANIFESTS])
def test_a_manifest_that_breaks_a_rule_is_refused_even_with_its_own_id(data, code):
    error = refusal(data)
    assert error.code == code, str(error)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(value):
    data = WEIGHTS[:-4] + float32(value)
    forged = identified(
        MANIFEST | {"weights": MANIFEST["weights"] | {"sha256": hashlib.sha256(data).hexdigest()}}
    )
    assert refusal(zipped(spell(forged), data)).code == "not-finite"


def test_other_weights_are_refused():
    assert refusal(zipped(spell(MANIFEST), WEIGHTS[:-4] + float32(1.5))).code == "checksum"
    assert refusal(zipped(spell(MANIFEST), WEIGHTS + float32(0))).code == "trailing-bytes"
    assert refusal(zipped(spell(MANIFEST), WEIGHTS[:-4])).code == "truncated"


def test_deep_nesting_is_refused_without_a_crash():
    deep = spell(MANIFEST).replace(
        b'"metadata":{', b'"metadata":{"deep":' + b"[" * 50_000 + b"]" * 50_000 + b","
    )
    assert refusal(zipped(deep, WEIGHTS)).code == "json"


def test_the_helpers_of_these_tests_build_the_real_bundle():
    assert zipped(spell(identified(MANIFEST)), WEIGHTS) == EDGE
    assert config() == first_parameter() == weights() == EDGE
