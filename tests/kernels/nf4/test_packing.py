"""NF4: packing and unpacking to the bit, on every implementation."""

import base64
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.dispatch import use
from kernels.nf4 import CODE_VALUES, PackedNf4, dequantize_nf4, quantize_nf4
from tests.kernels.cases import guarded, running
from tests.kernels.nf4.weights import ALL, FAST, normal, same, weights

FIXTURE = Path(__file__).parents[2] / "fixtures" / "nf4.json"


def scalar_codes(flat: np.ndarray, block_size: int) -> tuple[list[int], list[np.float32]]:
    codes, scales = [], []
    values = [np.float32(value) for value in CODE_VALUES]
    for begin in range(0, len(flat), block_size):
        block = flat[begin : begin + block_size]
        scale = max(np.abs(block))
        scales.append(scale)
        for weight in block:
            distances = [abs(np.float32(weight / scale) - value) for value in values] if scale else []
            codes.append(distances.index(min(distances)) if distances else 7)
    return codes, scales


def scalar_scales(scales: list[np.float32], group: int) -> tuple[list[int], list[np.float32], np.float32]:
    total = 0.0
    for scale in scales:
        total += float(scale)
    offset = np.float32(total / len(scales))
    codes, group_scales = [], []
    for begin in range(0, len(scales), group):
        rest = [scale - offset for scale in scales[begin : begin + group]]
        largest = max(abs(r) for r in rest)
        group_scales.append(largest)
        for r in rest:
            z = r / largest * np.float32(127) if largest else np.float32(0)
            half = np.float32(0.5)
            rounded = np.floor(z + half) if z >= 0 else np.ceil(z - half)
            codes.append(int(min(max(rounded, -127), 127)) + 128)
    return codes, group_scales, offset


def scalar_decoded(codes: list[int], group_scales: list[np.float32], offset: np.float32, group: int) -> list:
    ratios = [np.float32(np.float32(code - 128) / np.float32(127)) for code in codes]
    decoded = [offset + group_scales[i // group] * ratio for i, ratio in enumerate(ratios)]
    return [min(max(scale, np.float32(0)), np.finfo(np.float32).max) for scale in decoded]


def check_against_scalars(weight: torch.Tensor, block_size: int, double: bool, group: int) -> None:
    packed = quantize_nf4(weight, block_size, double, group)
    codes, scales = scalar_codes(weight.numpy().ravel(), block_size)
    padded = [*codes, 0][: len(codes) + len(codes) % 2]
    assert packed.codes.tolist() == [
        low | high << 4 for low, high in zip(padded[::2], padded[1::2], strict=True)
    ]
    if double:
        scale_codes, group_scales, offset = scalar_scales(scales, group)
        assert packed.scales.tolist() == scale_codes
        assert packed.group_scales is not None
        assert packed.group_scales.tolist() == [float(scale) for scale in group_scales]
        assert packed.offset == float(offset)
        scales = scalar_decoded(scale_codes, group_scales, offset, group)
    else:
        assert packed.scales.tolist() == [float(scale) for scale in scales]
    of_element = [scales[i // block_size] for i in range(len(codes))]
    expected = [
        scale * np.float32(CODE_VALUES[code]) if scale else np.float32(0)
        for scale, code in zip(of_element, codes, strict=True)
    ]
    assert dequantize_nf4(packed).numpy().tobytes() == np.array(expected, np.float32).tobytes()


@pytest.mark.parametrize("name", FAST)
def test_every_count_of_elements_is_exact(name: str) -> None:
    with running(name):
        for count in range(1, 201):
            double = count % 2 == 0
            check_against_scalars(normal(1, count, seed=count), (32, 64)[count // 2 % 2], double, 32)


@pytest.mark.parametrize("count", [1, 31, 33, 64, 131, 1030])
@pytest.mark.parametrize("double", [False, True])
def test_triton_is_exact(count: int, double: bool) -> None:
    with running("triton"):
        check_against_scalars(normal(1, count, seed=count), 32, double, 32)


@pytest.mark.parametrize("name", ALL)
def test_ties_zeros_and_extremes_are_exact(name: str) -> None:
    values = np.array(CODE_VALUES, np.float32)
    middles = (values[:-1] + values[1:]) / 2
    neighbours = [np.nextafter(middles, np.float32(side), dtype=np.float32) for side in (-2, 2)]
    ties = torch.from_numpy(np.concatenate([middles, *neighbours, values]))
    rows = torch.zeros(6, 64)
    rows[0, : len(ties)] = ties[:64]
    rows[1, :] = 3.4e38
    rows[2, :3] = torch.tensor([1e-45, -1e-45, 3e-45])  # subnormal
    rows[3, 5] = -0.0
    rows[4] = normal(64)
    rows[5, 63] = -1e-30
    with running(name):
        for double in (False, True):
            check_against_scalars(rows, 64, double, 32)


@pytest.mark.parametrize("name", ALL)
def test_decoded_scales_stay_between_zero_and_the_largest_float(name: str) -> None:
    codes = torch.full((64,), 0x0F, dtype=torch.uint8)  # 1, -1, 1, -1 ...
    groups = torch.tensor([3.4e38])
    scales = torch.tensor([1, 255, 128, 255], dtype=torch.uint8)
    packed = PackedNf4(codes, scales, (4, 32), 32, groups, 3.3e38, 256)
    with running(name):
        weight = dequantize_nf4(packed)
    largest = torch.finfo(torch.float32).max
    assert weight[:, 0].tolist() == [0.0, largest, float(np.float32(3.3e38)), largest]


@pytest.mark.parametrize("name", ALL)
def test_a_scale_of_zero_gives_zeros_without_a_sign(name: str) -> None:
    codes = torch.zeros(64, dtype=torch.uint8)  # all -1
    single = PackedNf4(codes, torch.zeros(4), (4, 32), 32)
    double = PackedNf4(codes, torch.full((4,), 128, dtype=torch.uint8), (4, 32), 32, torch.ones(1), 0.0, 256)
    with running(name):
        for packed in (single, double):
            assert dequantize_nf4(packed).numpy().tobytes() == bytes(4 * 128)


@pytest.mark.parametrize("name", FAST)
def test_the_vectors_of_the_contract_are_bit_exact(name: str) -> None:
    fixture = json.loads(FIXTURE.read_text())
    assert [float(value) for value in fixture["codebook"]] == list(CODE_VALUES)

    def floats(text: str, shape: list[int]) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").reshape(shape).copy())

    with running(name):
        for case in fixture["cases"]:
            sizes = (case["block_size"], case["double_quantization"], case["scale_block_size"])
            state = b"RTNF4S1\0" + struct.pack("<Q", len(fixture["order"]))
            for weight_name in fixture["order"]:
                shape = fixture["shapes"][weight_name]
                packed = quantize_nf4(floats(fixture["inputs"][weight_name], shape), *sizes)
                state += encoded(packed)
                expected = floats(case["dequantized"][weight_name], shape)
                assert dequantize_nf4(packed).numpy().tobytes() == expected.numpy().tobytes()
            assert state == base64.b64decode(case["packed_state_base64"])


def encoded(packed: PackedNf4) -> bytes:
    double = packed.group_scales is not None
    blocks, groups = len(packed.scales), len(packed.group_scales) if packed.group_scales is not None else 0
    fields = struct.pack(
        "<7Q4sI2Q",
        2,
        packed.block_size,
        len(packed.codes),
        0 if double else blocks,
        blocks if double else 0,
        groups,
        packed.scale_block_size or 0,
        struct.pack("<f", packed.offset),
        int(double),
        *packed.shape,
    )
    arrays = [
        packed.codes,
        packed.scales,
        *([packed.group_scales] if packed.group_scales is not None else []),
    ]
    return fields + b"".join(array.numpy().tobytes() for array in arrays)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(("shape", "block_size"), [((1000, 1000), 64), ((7, 63), 4096), ((50, 129), 512)])
def test_large_and_uneven_weights_pack_as_torch_does(name: str, shape: tuple, block_size: int) -> None:
    weight = guarded(normal(*shape))
    with use("torch"):
        expected = quantize_nf4(weight, block_size)
        values = dequantize_nf4(expected)
    with running(name):
        packed = quantize_nf4(weight.T.contiguous().T, block_size)
        assert same(packed, expected)
        assert torch.equal(dequantize_nf4(packed), values)


# Products


def test_what_cannot_be_packed_is_refused() -> None:
    for weight, sizes, message in [
        (torch.ones(3), (64,), "float32 matrix"),
        (torch.ones(3, 0), (64,), "with elements"),
        (torch.ones(3, 3).double(), (64,), "float32 matrix"),
        (torch.full((2, 2), torch.inf), (64,), "not finite"),
        (torch.ones(3, 3), (48,), "block_size 48"),
        (torch.ones(3, 3), (64, True, 16), "scale_block_size 16"),
    ]:
        with pytest.raises(ValueError, match=message):
            quantize_nf4(weight, *sizes)


def test_arrays_that_are_not_a_weight_are_refused() -> None:
    good = weights(65)[0]
    for changes, message in [
        ({"codes": good.codes[:-1]}, "codes must be"),
        ({"scales": good.scales.float()}, "scales must be"),
        ({"group_scales": None}, "belong together"),
        ({"scale_block_size": 256}, "group_scales must be"),
        ({"block_size": 65}, "block_size 65"),
        ({"shape": (5, 0)}, r"must have elements, got \[5, 0\]"),
        ({"codes": torch.stack([good.codes] * 2, 1)[:, 0]}, "contiguous"),
    ]:
        fields = {name: getattr(good, name) for name in PackedNf4.__dataclass_fields__}
        with pytest.raises(ValueError, match=message):
            PackedNf4(**fields | changes)


def test_a_weight_moves_between_devices() -> None:
    for packed in weights(65):
        assert same(packed.to("cpu"), packed)
        assert packed.to("meta").codes.device.type == "meta"
