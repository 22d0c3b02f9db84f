"""The adapted linear layer against float64: values, gradients, and what it keeps in between."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.dispatch import use
from kernels.linear import cpu as linear_cpu
from kernels.lora_linear import cpu, lora_linear
from kernels.native import library
from kernels.nf4 import PackedNf4, dequantize_nf4, panels, quantize_nf4
from kernels.operators import flop_counter
from tests.kernels.lab import sanitize

FAST = ["torch", *(["native"] if library() else [])]
ALL = [*FAST, "triton"]
BASES = ["dense", "packed"]
NAMES = ("x", "weight", "bias", "lora_a", "lora_b")
SCALE = 1.75


@contextlib.contextmanager
def running(name: str) -> Iterator[None]:
    with use(name), sanitize() if name == "triton" else contextlib.nullcontext():
        yield


def layer(
    base: str, count: int = 5, dtype: torch.dtype = torch.float32, columns: int = 70, rank: int = 3
) -> dict[str, Tensor | PackedNf4]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(count, columns), (17, columns), (17,), (rank, columns), (17, rank)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    arguments = {name: tensor.to(dtype) for name, tensor in zip(NAMES, tensors, strict=True)}
    if base == "packed":
        arguments["weight"] = quantize_nf4(tensors[1], 32)
    return arguments


def tensors_of(arguments: dict) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in arguments.items() if isinstance(tensor, Tensor)}


def require_gradients(arguments: dict) -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in tensors_of(arguments).values()]


def composed(arguments: dict, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """The formula by torch's own operations, and the leaves that it depends on."""
    weight = arguments["weight"]
    dense = dequantize_nf4(weight) if isinstance(weight, PackedNf4) else weight
    leaves = {
        name: tensor.detach().to(dtype).requires_grad_()
        for name, tensor in {**arguments, "weight": dense}.items()
    }
    x, w, bias, a, b = leaves.values()
    wanted = [leaf for name, leaf in leaves.items() if name in tensors_of(arguments)]
    return linear(x, w, bias) + (x @ a.T) @ b.T * SCALE, wanted


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max()) if exact.numel() else 0.0


def size(exact: Tensor) -> float:
    return error(torch.zeros_like(exact), exact)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_as_near_to_float64_as_torchs(name: str, base: str, dtype) -> None:
    for count in (1, 13) if name == "triton" else (0, 1, 4, 13, 33):
        arguments = layer(base, count, dtype)
        upstream = torch.cos(torch.arange(count * 17.0)).view(count, 17).to(dtype)
        exact, exact_leaves = composed(arguments, torch.float64)
        own, own_leaves = composed(arguments, dtype)
        leaves = require_gradients(arguments)
        with running(name):
            y = lora_linear(*arguments.values(), SCALE)
            found = torch.autograd.grad(y, leaves, upstream)
        assert y.dtype == dtype
        assert error(y, exact) <= 2 * error(own, exact) + 3e-7 * size(exact)
        exact_gradients = torch.autograd.grad(exact, exact_leaves, upstream.double())
        own_gradients = torch.autograd.grad(own, own_leaves, upstream)
        for one, other, true in zip(found, own_gradients, exact_gradients, strict=True):
            assert one.shape == true.shape
            assert error(one, true) <= 3 * error(other, true) + 3e-7 * size(true)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("base", BASES)
def test_many_rows_may_be_multiplied_with_rounded_operands(name: str, base: str) -> None:
    """Full tiles and odd edges; no further away than such operands are, the adapter's part not at all."""
    arguments = layer(base, 131, columns=150, rank=9)
    upstream = torch.cos(torch.arange(131 * 17.0)).view(131, 17)
    exact, exact_leaves = composed(arguments, torch.float64)
    wanted = [exact, *torch.autograd.grad(exact, exact_leaves, upstream.double())]
    for operands, most in (("full", 1e-6), ("half", 4e-3), ("int8", 1.5e-2)):
        leaves = require_gradients(arguments)
        with running(name):
            y = lora_linear(*arguments.values(), SCALE, operands=operands)
            found = [y, *torch.autograd.grad(y, leaves, upstream)]
        away = [float((one - true).norm() / true.norm()) for one, true in zip(found, wanted, strict=True)]
        assert max(away) < most
        ours = name == "native" and linear_cpu.built
        rounded = operands != "full"
        if rounded and (ours or base == "dense"):  # torch may multiply a packed weight in float32
            assert min(away[:2]) > 1e-6  # y and the gradient of x
        if rounded:
            assert max(away[-2:]) < 1e-6  # those of A and B


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("count", [5, 131])
def test_a_residual_is_added_and_has_the_upstream_gradient(name: str, base: str, count: int) -> None:
    plain, summed = layer(base, count, columns=150), layer(base, count, columns=150)
    leaves, others = require_gradients(plain), require_gradients(summed)
    residual = torch.randn(1, count, 17).requires_grad_()
    upstream = torch.cos(torch.arange(count * 17.0)).view(1, count, 17)
    plain["x"], summed["x"] = plain["x"][None], summed["x"][None]
    with running(name):
        wanted = residual + lora_linear(*plain.values(), SCALE)
        found = lora_linear(*summed.values(), SCALE, residual=residual)
        gradients = torch.autograd.grad(found, [*others, residual], upstream)
        expected = torch.autograd.grad(wanted, [*leaves, residual], upstream)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("count", [1, 12])
def test_few_rows_are_not_rounded_over_a_packed_weight(count: int) -> None:
    arguments = layer("packed", count)
    wanted = lora_linear(*arguments.values(), SCALE)
    assert torch.equal(lora_linear(*arguments.values(), SCALE, operands="int8"), wanted)


@pytest.mark.parametrize("name", FAST)
def test_each_panel_of_a_packed_weight_adds_its_own_part_of_the_residual(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(panels, "PANEL", 64 * 96)
    weight, x = torch.randn(200, 96), torch.randn(40, 96)
    adapter, residual = (torch.randn(3, 96), torch.randn(200, 3), SCALE), torch.randn(40, 200)
    with running(name):
        plain = lora_linear(x, quantize_nf4(weight), None, *adapter)
        summed = lora_linear(x, quantize_nf4(weight), None, *adapter, residual=residual)
    torch.testing.assert_close(summed, plain + residual, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("base", BASES)
def test_only_what_is_asked_for_has_a_gradient(base: str) -> None:
    exact, exact_leaves = composed(layer(base), torch.float64)
    names = list(tensors_of(layer(base)))
    expected = dict(zip(names, torch.autograd.grad(exact.sum(), exact_leaves), strict=True))
    for needs in itertools.product([False, True], repeat=len(names)):
        arguments = layer(base)
        for name, needed in zip(names, needs, strict=True):
            arguments[name].requires_grad_(needed)
        y = lora_linear(*arguments.values(), SCALE)
        assert y.requires_grad == any(needs)
        if any(needs):
            y.sum().backward()
        for name, needed in zip(names, needs, strict=True):
            gradient = arguments[name].grad
            assert (gradient is not None) == needed
            if gradient is not None:
                torch.testing.assert_close(gradient.double(), expected[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("layout", ["permuted", "sliced", "expanded", "concatenated"])
def test_memory_of_any_layout_gives_the_same(base: str, layout: str) -> None:
    upstream = {
        "permuted": torch.randn(17, 3, 2).permute(2, 1, 0),
        "sliced": torch.randn(2, 3, 34)[..., ::2],
        "expanded": torch.randn(17).expand(2, 3, 17),
        "concatenated": torch.cat([torch.randn(2, 3, 9), torch.randn(2, 3, 12)], -1)[..., 2:19],
    }[layout]
    dense = layer(base, 6)
    dense["x"] = dense["x"].view(2, 3, 70)
    strided = {name: spread(value) if isinstance(value, Tensor) else value for name, value in dense.items()}
    before = {name: value.clone() for name, value in tensors_of(strided).items()}
    upstream_before = upstream.clone()
    results = []
    for arguments, gradient in ((dense, upstream.contiguous()), (strided, upstream)):
        leaves = require_gradients(arguments)
        y = lora_linear(*arguments.values(), SCALE)
        results.append([y, *torch.autograd.grad(y, leaves, gradient)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(strided[name], value) for name, value in before.items())
    assert torch.equal(upstream, upstream_before)


def spread(tensor: Tensor) -> Tensor:
    """The same values in every second place, NaN between them."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan)
    wide[..., ::2] = tensor
    return wide[..., ::2]


@pytest.mark.parametrize("base", BASES)
def test_it_is_one_node_that_keeps_x_and_its_projection(base: str) -> None:
    arguments = layer(base)
    require_gradients(arguments)
    known = [*tensors_of(arguments).values()]
    if isinstance(arguments["weight"], PackedNf4):
        known += [field for field in arguments["weight"].fields() if isinstance(field, Tensor)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y = lora_linear(*arguments.values(), SCALE)
    assert all(type(node).__name__ == "AccumulateGrad" for node, _ in y.grad_fn.next_functions if node)
    places = {tensor.data_ptr() for tensor in known}
    assert [tuple(x.shape) for x in kept if x.data_ptr() not in places] == [(5, 3)]


@pytest.mark.parametrize("base", BASES)
def test_a_gradient_with_two_consumers_is_not_changed(base: str) -> None:
    arguments = layer(base)
    leaves = require_gradients(arguments)
    y = lora_linear(*arguments.values(), SCALE)
    z = y + torch.zeros_like(y).requires_grad_()
    upstream = torch.randn(5, 17)
    copy = upstream.clone()
    first = torch.autograd.grad(z, leaves, upstream, retain_graph=True)
    assert torch.equal(upstream, copy)
    for one, other in zip(first, torch.autograd.grad(z, leaves, upstream), strict=True):
        assert torch.equal(one, other)


def test_native_code_declines_an_update_of_another_dtype() -> None:
    arguments = layer("packed", count=40)
    x, packed = arguments["x"], arguments["weight"].fields()
    left, right = torch.randn(40, 3).bfloat16(), arguments["lora_b"].T
    assert cpu.packed_forward(x, packed, None, None, "full", left, right, 1.0) is NotImplemented


@pytest.mark.parametrize("base", BASES)
def test_there_need_be_no_bias(base: str) -> None:
    arguments = layer(base)
    with_zeros = lora_linear(*{**arguments, "bias": torch.zeros(17)}.values(), SCALE)
    without = lora_linear(*{**arguments, "bias": None}.values(), SCALE)
    torch.testing.assert_close(without, with_zeros)


def test_a_single_vector_is_a_row() -> None:
    arguments = layer("packed", 1)
    expected = lora_linear(*arguments.values(), SCALE)[0]
    arguments["x"] = arguments["x"][0].requires_grad_()
    y = lora_linear(*arguments.values(), SCALE)
    y.sum().backward()
    assert torch.equal(y, expected)
    assert arguments["x"].grad.shape == (70,)


@pytest.mark.parametrize("base", BASES)
def test_gradients_in_float64_are_exact(base: str) -> None:
    arguments = layer(base, 1, torch.float64, columns=3, rank=1)
    require_gradients(arguments)
    others = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}

    def call(*tensors: Tensor) -> Tensor:
        given = dict(zip(tensors_of(arguments), tensors, strict=True)) | others
        return lora_linear(*(given[name] for name in NAMES), SCALE)

    assert torch.autograd.gradcheck(call, tuple(tensors_of(arguments).values()))


@pytest.mark.parametrize("base", BASES)
def test_the_operators_keep_torchs_rules(base: str) -> None:
    arguments = layer(base, columns=33)
    arguments["x"] = arguments["x"].T.contiguous().T
    require_gradients(arguments)
    weight = arguments["weight"]
    flat = weight.fields() if isinstance(weight, PackedNf4) else (weight,)
    residual = torch.randn(5, 17).requires_grad_()
    rest = (arguments["bias"], residual, arguments["lora_a"], arguments["lora_b"], SCALE, "full")
    name = "lora_linear_nf4" if base == "packed" else "lora_linear"
    operators, x = torch.ops.riftco, arguments["x"]
    torch.library.opcheck(getattr(operators, name).default, (x, *flat, *rest))
    saved = [t.detach() for t in (arguments["lora_a"], arguments["lora_b"])]
    upstream, hidden = torch.randn(17, 5).T, torch.randn(5, 3)
    needed = [True, base == "dense", True, True, True]
    given = (upstream, x.detach(), hidden, *(t.detach() if base == "dense" else t for t in flat), *saved)
    torch.library.opcheck(getattr(operators, f"{name}_backward").default, (*given, SCALE, needed, "half"))


@pytest.mark.parametrize("base", BASES)
def test_a_compiled_function_gives_the_same(base: str) -> None:
    arguments = layer(base)
    leaves = require_gradients(arguments)

    def loss(x: Tensor, lora_a: Tensor) -> Tensor:
        return lora_linear(*{**arguments, "x": x, "lora_a": lora_a}.values(), SCALE).square().sum()

    given = (arguments["x"], arguments["lora_a"])
    expected = torch.autograd.grad(loss(*given), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for one, other in zip(torch.autograd.grad(compiled(*given), leaves), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("base", BASES)
def test_products_are_counted(base: str) -> None:
    arguments = layer(base)
    leaves = require_gradients(arguments)
    with flop_counter(display=False) as counter:
        lora_linear(*arguments.values(), SCALE).sum().backward()
    weight, a, b = 5 * 70 * 17, 5 * 70 * 3, 5 * 3 * 17
    assert len(leaves) == (4 if base == "packed" else 5)
    assert counter.get_total_flops() == 2 * (weight * (2 if base == "packed" else 3) + 3 * a + 3 * b)


@pytest.mark.parametrize("base", BASES)
def test_what_does_not_fit_is_refused(base: str) -> None:
    good = layer(base)
    for changes, message in [
        ({"x": torch.ones(2, 69)}, "70 columns"),
        ({"x": torch.ones(2, 70, dtype=torch.int32)}, "float32, bfloat16 or"),
        ({"bias": torch.ones(16)}, r"bias must be torch.float32 \[17\]"),
        ({"lora_a": torch.ones(3, 69)}, "lora_a must be"),
        ({"lora_b": torch.ones(17, 4)}, r"lora_b must be torch.float32 \[17, 3\]"),
        ({"lora_a": torch.ones(3, 70).double()}, "lora_a must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            lora_linear(*{**good, **changes}.values(), SCALE)
