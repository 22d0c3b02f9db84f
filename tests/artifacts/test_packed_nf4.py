"""Packed NF4 weights: the original's bytes come back, and every rule of the format refuses what breaks it."""

import base64
import struct

import numpy as np
import pytest

from artifacts import ArtifactError, PackedNf4Weight, QuantizedScales
from artifacts.packed_nf4 import decode_packed, encode_packed
from tests.artifacts.checkpoints import QLORA, contents_of, packed_weight
from tests.support import fixture

NF4 = fixture("nf4.json")
STATES = [base64.b64decode(case["packed_state_base64"]) for case in NF4["cases"]]
STATES.append(contents_of(QLORA)[1]["model-nf4.rtnf4"])


@pytest.mark.parametrize("data", STATES)
def test_the_states_of_the_original_come_back_byte_for_byte(data):
    assert encode_packed(decode_packed(data)) == data


@pytest.mark.parametrize("case", NF4["cases"])
def test_a_decoded_state_has_the_settings_it_was_made_with(case):
    weights = decode_packed(base64.b64decode(case["packed_state_base64"]))
    assert [list(weight.shape) for weight in weights] == [NF4["shapes"][name] for name in NF4["order"]]
    for weight in weights:
        assert weight.block_size == case["block_size"]
        assert isinstance(weight.scales, QuantizedScales) == case["double_quantization"]
        if isinstance(weight.scales, QuantizedScales):
            assert weight.scales.block_size == case["scale_block_size"]


def single(**changes) -> bytes:
    """A state of one 3 x 3 weight with float32 scales whose header fields are overridden."""
    return forged(packed_weight(3, 3), **changes)


def nested_weight(**changes) -> PackedNf4Weight:
    parts = {
        "codes": np.array([5], np.uint8),
        "scales": np.ones(1, np.float32),
        "block_size": 32,
        "offset": 0.5,
    }
    return packed_weight(3, 3, scales=QuantizedScales(**(parts | changes)))


FIELDS = (
    "rank",
    "block",
    "codes",
    "scales",
    "nested",
    "groups",
    "group_size",
    "offset",
    "flag",
    "rows",
    "columns",
)
LAYOUT = "<7Q4sI2Q"


def forged(weight: PackedNf4Weight, tail: bytes = b"", **changes) -> bytes:
    data = encode_packed([weight])
    fields = dict(zip(FIELDS, struct.unpack_from(LAYOUT, data, 16), strict=True)) | changes
    return data[:16] + struct.pack(LAYOUT, *fields.values()) + data[96:] + tail


HUGE = 2**64 - 1
HEADERS = [
    {"rank": 1},
    {"rank": 3},
    {"block": 0},
    {"block": 63},
    {"block": 8192},
    {"block": HUGE},
    {"codes": 4},
    {"codes": 6},
    {"codes": HUGE},
    {"codes": 2**62},
    {"scales": 0},
    {"scales": 2},
    {"scales": 2**62},
    {"nested": 1},
    {"groups": 1},
    {"group_size": 32},
    {"offset": struct.pack("<f", 0.5)},
    {"offset": struct.pack("<f", -0.0)},
    {"flag": 1},
    {"flag": 2},
    {"rows": 0},
    {"columns": 0},
    {"rows": 4},
    {"columns": 2},
    {"rows": 2**32, "columns": 2**32},
    {"rows": 2**63, "columns": 2},
    {"rows": HUGE, "columns": HUGE, "codes": 5},
    {"rows": 2**33, "columns": 2**33, "codes": 2**65 % 2**64},
    {"tail": b"\0"},
]
NESTED_HEADERS = [
    {"scales": 1},
    {"nested": 0},
    {"nested": 2},
    {"groups": 0},
    {"groups": 2},
    {"groups": 2**62},
    {"group_size": 0},
    {"group_size": 33},
    {"offset": struct.pack("<f", -1.0)},
    {"offset": struct.pack("<f", float("nan"))},
    {"offset": struct.pack("<f", float("inf"))},
    {"flag": 0},
    {"flag": 3},
    {"rows": 0},
]


@pytest.mark.parametrize("changes", HEADERS)
def test_a_forged_header_is_refused(changes):
    with pytest.raises(ArtifactError) as caught:
        decode_packed(single(**changes))
    assert caught.value.code == "packed"


@pytest.mark.parametrize("changes", NESTED_HEADERS)
def test_a_forged_header_of_quantised_scales_is_refused(changes):
    with pytest.raises(ArtifactError) as caught:
        decode_packed(forged(nested_weight(), **changes))
    assert caught.value.code == "packed"


def test_the_forgers_of_these_tests_leave_a_state_alone_when_told_nothing():
    assert len(decode_packed(single())) == len(decode_packed(forged(nested_weight()))) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"RTNF4S1\0",
        b"RTNF4S2\0" + single()[8:],
        single()[:8] + struct.pack("<Q", 0) + single()[16:],
        single()[:8] + struct.pack("<Q", 2) + single()[16:],
        single()[:8] + struct.pack("<Q", HUGE) + single()[16:],
        b"RTNF4S1\0" + struct.pack("<Q", 0),
    ],
)
def test_a_state_without_its_frame_is_refused(data):
    with pytest.raises(ArtifactError):
        decode_packed(data)


def test_every_shorter_state_is_refused():
    data = STATES[-1]
    for length in range(len(data)):
        with pytest.raises(ArtifactError):
            decode_packed(data[:length])


def bytes_of(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_the_half_byte_behind_an_odd_count_must_be_zero():
    packed_weight(3, 3, codes=bytes_of(1, 2, 3, 4, 0x0F))
    with pytest.raises(ArtifactError, match="behind its last element"):
        packed_weight(3, 3, codes=bytes_of(1, 2, 3, 4, 0x1F))
    packed_weight(2, 2, codes=bytes_of(0xFF, 0xFF))


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_scales_must_be_finite_and_not_negative(scale):
    with pytest.raises(ArtifactError, match="scale that is negative or not finite"):
        packed_weight(scales=floats(scale))
    with pytest.raises(ArtifactError, match="scale that is negative or not finite"):
        nested_weight(scales=floats(scale))
    with pytest.raises(ArtifactError, match="offset"):
        nested_weight(offset=scale)


def test_a_block_of_scale_zero_holds_only_the_code_of_zero():
    blocks = {"shape": (1, 66), "block_size": 32}
    codes = np.full(33, 0x77, np.uint8)
    PackedNf4Weight(codes=codes, scales=floats(0, 0, 0), **blocks)
    codes[16] = 0x17  # element 33, in the second block
    PackedNf4Weight(codes=codes, scales=floats(0, 1, 0), **blocks)
    for scales in (floats(1, 0, 1), floats(1, -0.0, 1)):
        with pytest.raises(ArtifactError, match="block of scale zero"):
            PackedNf4Weight(codes=codes, scales=scales, **blocks)
    codes[16], codes[32] = 0x77, 0x78  # element 64, in the last block
    with pytest.raises(ArtifactError, match="block of scale zero"):
        PackedNf4Weight(codes=codes, scales=floats(1, 1, 0), **blocks)


def test_quantised_scales_may_decode_to_zero_over_any_codes():
    nested_weight(scales=floats(0), offset=0.0)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"codes": np.ones(5)}, TypeError),
        ({"codes": np.ones((5, 1), np.uint8)}, TypeError),
        ({"scales": np.ones(1)}, TypeError),
        ({"shape": (3.0, 3)}, TypeError),
        ({"shape": (0, 3)}, ValueError),
        ({"shape": (3, 4)}, ArtifactError),
        ({"block_size": 16}, ArtifactError),
        ({"scales": floats(1, 1)}, ArtifactError),
    ],
)
def test_weights_that_cannot_be_are_refused(changes, error):
    with pytest.raises(error):
        packed_weight(3, 3, **changes)


def test_a_packed_weight_owns_its_arrays():
    codes = bytes_of(1, 2, 3, 4, 5)
    weight = packed_weight(3, 3, codes=codes)
    codes[:] = 0
    assert weight.codes.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="WRITEABLE"):
        weight.codes.flags.writeable = True
