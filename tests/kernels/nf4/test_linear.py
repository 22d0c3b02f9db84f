"""NF4 products against float64, on every implementation."""

import itertools

import pytest
import torch
from torch.nn.functional import linear

from kernels.linear import cpu as linear_cpu
from kernels.nf4 import PackedNf4, dequantize_nf4, nf4_linear, panels, quantize_nf4
from kernels.operators import flop_counter
from tests.kernels.cases import guarded, running
from tests.kernels.nf4.weights import ALL, FAST, normal, weights


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


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(("operands", "most"), [("half", 3e-4), ("int8", 1.5e-2)])
def test_rounded_operands_lose_what_they_may(name: str, operands: str, most: float) -> None:
    packed = weights(200, 300)[0]
    weight, upstream = dequantize_nf4(packed).double(), normal(70, 300, seed=5)
    x, bias = normal(70, 200).requires_grad_(), normal(300)
    with running(name):
        y = nf4_linear(x, packed, bias, operands=operands)
        (gradient,) = torch.autograd.grad(y, x, upstream)
    for found, exact in (
        (y, linear(x.double(), weight, bias.double())),
        (gradient, upstream.double() @ weight),
    ):
        away = float((found - exact).norm() / exact.norm())
        assert away < most
        assert away > 1e-6 or name == "torch" or not linear_cpu.built  # these may multiply in float32


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
    torch.library.opcheck(operators.nf4_linear.default, (x, *packed.fields(), bias, "full"))
    torch.library.opcheck(operators.nf4_linear_backward.default, (normal(4, 20), *packed.fields(), "half"))


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
    x = normal(5, 65).requires_grad_()
    with flop_counter(display=False) as counter:
        nf4_linear(x, weights(65)[0]).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 5 * 65 * 20


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
