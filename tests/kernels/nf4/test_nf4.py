"""NF4: packing and unpacking to the bit, products against float64, on every implementation."""

import base64
import contextlib
import itertools
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from kernels.dispatch import use
from kernels.native import library
from kernels.nf4 import CODE_VALUES, PackedNf4, dequantize_nf4, nf4_linear, panels, quantize_nf4
from tests.kernels.lab import sanitize

FIXTURE = Path(__file__).parents[2] / "fixtures" / "nf4.json"
FAST = ["torch", *(["native"] if library() else [])]
ALL = [*FAST, "triton"]


@contextlib.contextmanager
def running(name: str) -> Iterator[None]:
    with use(name), sanitize() if name == "triton" else contextlib.nullcontext():
        yield


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def guarded(x: torch.Tensor) -> torch.Tensor:
    """The same values with NaN before and behind them."""
    storage = torch.full((x.numel() + 64,), torch.nan, dtype=x.dtype)
    storage[32:-32] = x.flatten()
    return storage[32:-32].view(x.shape)


def same(one: PackedNf4, other: PackedNf4) -> bool:
    pairs = [(one.codes, other.codes), (one.scales, other.scales)]
    if one.group_scales is not None and other.group_scales is not None:
        pairs.append((one.group_scales, other.group_scales))
    kinds = (one.group_scales is None) == (other.group_scales is None)
    return kinds and one.offset == other.offset and all(torch.equal(a, b) for a, b in pairs)


# The contract, step by step, one float32 at a time.


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


@pytest.mark.parametrize("count", [1, 31, 33, 64, 131])
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


def weights(columns: int, rows: int = 20) -> list[PackedNf4]:
    weight = normal(rows, columns, seed=1)
    return [
        quantize_nf4(weight, block, double, 32) for block, double in [(32, True), (64, False), (128, True)]
    ]


def check_product(x: torch.Tensor, packed: PackedNf4, bias: torch.Tensor | None) -> None:
    """No further from float64 than twice torch's own product of the same dtype."""
    weight = dequantize_nf4(packed)
    wide = None if bias is None else bias.double()
    exact = linear(x.double(), weight.double(), wide)
    own = (linear(x, weight.to(x.dtype), bias).double() - exact).abs().max()
    found = nf4_linear(x, packed, bias)
    assert found.dtype == x.dtype
    assert found.shape == exact.shape
    assert (found.double() - exact).abs().max() <= 2 * own + 1e-6 * exact.abs().max()


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("columns", [1, 31, 63, 64, 65, 96, 128, 192, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_as_near_to_float64_as_dense_ones(name: str, columns: int, dtype: torch.dtype) -> None:
    with running(name):
        for packed, count in itertools.product(
            weights(columns), (1, 13) if name == "torch" else range(1, 14)
        ):
            check_product(guarded(normal(count, columns).to(dtype)), packed, normal(20).to(dtype))


@pytest.mark.parametrize("count", [1, 8, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_products_are_as_near_to_float64_as_dense_ones(count: int, dtype: torch.dtype) -> None:
    with running("triton"):
        for packed in weights(70, 17)[:2]:
            check_product(guarded(normal(count, 70).to(dtype)), packed, normal(17).to(dtype))
        check_product(normal(70, count).to(dtype).T, packed, None)


@pytest.mark.parametrize("name", FAST)
def test_float64_inputs_give_float64_products(name: str) -> None:
    packed = weights(65)[0]
    x = normal(3, 65).double()
    with running(name):
        assert torch.allclose(nf4_linear(x, packed), x @ dequantize_nf4(packed).double().T, rtol=1e-14)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layout", ["dense", "permuted", "sliced", "expanded", "concatenated"])
def test_gradients_of_any_layout_go_back_through_the_weight(name: str, layout: str) -> None:
    packed = weights(70, 17)[0]
    x = normal(2, 3, 70).requires_grad_()
    bias = normal(17).requires_grad_()
    upstream = {
        "dense": normal(2, 3, 17),
        "permuted": normal(17, 3, 2).permute(2, 1, 0),
        "sliced": normal(2, 3, 34)[..., ::2],
        "expanded": normal(17).expand(2, 3, 17),
        "concatenated": torch.cat([normal(2, 3, 9), normal(2, 3, 12)], -1)[..., 2:19],
    }[layout]
    before = upstream.clone()
    with running(name):
        nf4_linear(x, packed, bias).backward(upstream)
    exact = upstream.double() @ dequantize_nf4(packed).double()
    torch.testing.assert_close(x.grad.double(), exact, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(bias.grad, upstream.sum((0, 1)))
    assert torch.equal(upstream, before)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("count", [2, 40])
def test_bf16_gradients_are_as_near_to_float64_as_dense_ones(name: str, count: int) -> None:
    packed = weights(130, 70)[0]
    weight = dequantize_nf4(packed)
    x = normal(count, 130).bfloat16().requires_grad_()
    upstream = normal(count, 70, seed=3).bfloat16()
    exact = upstream.double() @ weight.double()
    own = ((upstream @ weight.bfloat16()).double() - exact).abs().max()
    with running(name):
        (gradient,) = torch.autograd.grad(nf4_linear(x, packed), x, upstream)
    assert (gradient.double() - exact).abs().max() <= 3 * own


@pytest.mark.parametrize("needs", [*itertools.product([False, True], repeat=2)])
def test_only_what_is_asked_for_has_a_gradient(needs: tuple[bool, bool]) -> None:
    x, bias = normal(3, 65).requires_grad_(needs[0]), normal(20).requires_grad_(needs[1])
    y = nf4_linear(x, weights(65)[0], bias)
    assert y.requires_grad == any(needs)
    if any(needs):
        y.sum().backward()
    assert [tensor.grad is not None for tensor in (x, bias)] == list(needs)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (64,), (1, 2, 3, 64)])
def test_x_may_have_any_leading_shape(name: str, shape: tuple[int, ...]) -> None:
    packed = weights(64, 5)[1]
    x = normal(*shape).requires_grad_()
    with running(name):
        y = nf4_linear(x, packed)
        y.backward(torch.ones_like(y))
    torch.testing.assert_close(y, linear(x.detach(), dequantize_nf4(packed)), atol=1e-5, rtol=1e-5)
    assert x.grad.shape == shape


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("count", [2, 40])
def test_panels_give_what_the_whole_gives(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = weights(200, 300)[0]
    weight = dequantize_nf4(packed)
    x = normal(count, 200).requires_grad_()
    bias = normal(300)
    monkeypatch.setattr(panels, "PANEL", 64 * 200)
    with running(name):
        y = nf4_linear(x, packed, bias)
        (gradient,) = torch.autograd.grad(y, x, normal(count, 300, seed=5))
    torch.testing.assert_close(y, linear(x, weight, bias), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gradient, normal(count, 300, seed=5) @ weight, atol=1e-4, rtol=1e-4)


def test_the_weight_is_never_there_as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = weights(200, 300)[0]
    sizes = []
    decode = panels._panels

    def watched(*arguments):
        for first, last, panel in decode(*arguments):
            sizes.append(panel.numel())
            yield first, last, panel

    monkeypatch.setattr(panels, "PANEL", 64 * 200)
    monkeypatch.setattr(panels, "_panels", watched)
    x = normal(40, 200).requires_grad_()
    nf4_linear(x, packed).sum().backward()
    assert len(sizes) > 4
    assert max(sizes) <= 64 * 300


@pytest.mark.parametrize("name", ALL)
def test_the_same_call_gives_the_same_bits(name: str) -> None:
    packed = weights(64, 17)[0]
    x = normal(3, 64)
    with running(name):
        assert torch.equal(nf4_linear(x, packed), nf4_linear(x, packed))


def test_threads_do_not_change_bits() -> None:
    packed = quantize_nf4(normal(700, 256))
    x = normal(3, 256)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append((nf4_linear(x, packed), dequantize_nf4(packed)))
    torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_weights_of_two_dtypes_of_input_live_side_by_side() -> None:
    packed = weights(64)[0]
    x = normal(2, 64)
    first = nf4_linear(x, packed)
    assert nf4_linear(x.bfloat16(), packed).dtype == torch.bfloat16
    assert torch.equal(nf4_linear(x, packed), first)


def test_the_operators_keep_torchs_rules() -> None:
    packed = weights(65)[0]
    x, bias = normal(5, 2, 65).transpose(0, 1).requires_grad_(), normal(20).requires_grad_()
    operators = torch.ops.riftco
    torch.library.opcheck(operators.nf4_quantize.default, (normal(5, 13), 32))
    torch.library.opcheck(operators.nf4_dequantize.default, weights(65)[1].fields())
    torch.library.opcheck(operators.nf4_linear.default, (x, *packed.fields(), bias))
    torch.library.opcheck(operators.nf4_linear_backward.default, (normal(4, 20), *packed.fields()))


def test_a_compiled_function_gives_the_same() -> None:
    packed = weights(65)[0]
    x, bias = normal(5, 65).requires_grad_(), normal(20).requires_grad_()

    def loss(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return nf4_linear(x, packed, bias).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(x, bias), (x, bias))
    for one, other in zip(torch.autograd.grad(compiled(x, bias), (x, bias)), expected, strict=True):
        assert torch.equal(one, other)


def test_products_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = normal(5, 65).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        nf4_linear(x, weights(65)[0]).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 5 * 65 * 20


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


def test_what_does_not_fit_the_weight_is_refused() -> None:
    packed = weights(65)[0]
    for x, bias, message in [
        (normal(2, 64), None, "65 columns"),
        (torch.ones(2, 65, dtype=torch.int32), None, "float32, bfloat16 or float64"),
        (normal(2, 65), normal(21), r"bias must be torch.float32 \[20\]"),
        (normal(2, 65), normal(20).double(), "bias must be"),
        (normal(2, 65).to("meta"), None, "move one"),
    ]:
        with pytest.raises(ValueError, match=message):
            nf4_linear(x, packed, bias)


def test_arrays_that_are_not_a_weight_are_refused() -> None:
    good = weights(65)[0]
    for changes, message in [
        ({"codes": good.codes[:-1]}, "codes must be"),
        ({"scales": good.scales.float()}, "scales must be"),
        ({"group_scales": None}, "belong together"),
        ({"scale_block_size": 256}, "group_scales must be"),
        ({"block_size": 65}, "block_size 65"),
        ({"codes": torch.stack([good.codes] * 2, 1)[:, 0]}, "contiguous"),
    ]:
        fields = {name: getattr(good, name) for name in PackedNf4.__dataclass_fields__}
        with pytest.raises(ValueError, match=message):
            PackedNf4(**fields | changes)


def test_a_weight_moves_between_devices() -> None:
    for packed in weights(65):
        assert same(packed.to("cpu"), packed)
        assert packed.to("meta").codes.device.type == "meta"
