"""Linear layers and the feed-forward: every implementation against torch's own composition and float64."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import feed_forward, linear, lora_linear, nf4_linear, quantize_nf4
from kernels.linear import _feed_forward, _feed_forward_backward, _linear, _linear_backward, cpu, reference
from kernels.linear.reference import has_matrix_units, multiplies_bfloat16
from kernels.operands import in_bytes
from kernels.operators import flop_counter
from tests.kernels.cases import LAYOUTS, assert_as_exact_as, bits, leaves, random, running

SIZES = [(32, 1, 1), (33, 5, 17), (48, 16, 6), (97, 257, 31), (200, 40, 130), (35, 600, 2100)]
FEED_FORWARD_SIZES = [(32, 1, 1), (37, 6, 19), (193, 24, 70)]


@pytest.fixture(params=("torch", "native"))
def implementation(request):
    if request.param == "native" and not cpu.built:
        pytest.skip("no native code for this machine was built")
    with running(request.param):
        yield request.param


def layer(rows: int, width: int, out: int) -> list[Tensor]:
    scale = width**-0.5
    return [
        random(rows, width),
        random(out, width, seed=1, scale=scale),
        random(out, seed=2),
        random(rows, out, seed=3),
    ]


def network(rows: int, width: int, inner: int) -> list[Tensor]:
    return [
        random(rows, width),
        random(inner, width, seed=1, scale=2 * width**-0.5),
        random(inner, seed=2),
        random(width, inner, seed=3, scale=inner**-0.5),
        random(width, seed=4),
        random(rows, width, seed=5),
    ]


def run_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    return linear(x, weight, bias, residual=residual)


def composed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    y = functional.linear(x, weight, bias)
    return y if residual is None else residual + y


def composed_feed_forward(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, residual: Tensor
) -> Tensor:
    return residual + functional.linear(functional.gelu(functional.linear(x, w1, b1)), w2, b2)


def check(
    call: Callable[..., Tensor], peer: Callable[..., Tensor], inputs: list[Tensor | None], upstream: Tensor
) -> list[Tensor]:
    """Our result and gradients, held against torch's own and float64."""
    ours, torchs, exact = leaves(*inputs), leaves(*inputs), leaves(*inputs, dtype=torch.float64)
    results = [call(*ours), peer(*torchs), peer(*exact)]
    assert results[0].is_contiguous()
    assert_as_exact_as(*results, 2, "forward")
    for result in results:
        result.backward(upstream.to(result.dtype))
    for place, found in enumerate(zip(ours, torchs, exact, strict=True)):
        if found[0] is not None:
            assert_as_exact_as(*(leaf.grad for leaf in found), 3, f"gradient {place}")
    return [results[0].detach(), *(leaf.grad for leaf in ours if leaf is not None)]


@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients_are_as_exact_as_torchs(implementation, size) -> None:
    x, weight, bias, residual = layer(*size)
    upstream = random(size[0], size[2], seed=9)
    check(run_linear, composed_linear, [x, weight, bias, residual], upstream)
    check(run_linear, composed_linear, [x, weight, None, residual], upstream)
    check(run_linear, composed_linear, [x, weight, bias, None], upstream)
    check(run_linear, composed_linear, [x, weight, None, None], upstream)


@pytest.mark.parametrize("size", FEED_FORWARD_SIZES)
def test_the_feed_forward_is_as_exact_as_torchs(implementation, size) -> None:
    check(feed_forward, composed_feed_forward, network(*size), random(size[0], size[1], seed=9))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_will_do(implementation, layout) -> None:
    lay = LAYOUTS[layout]
    inputs, upstream = [lay(x) if x.ndim == 2 else x for x in layer(40, 37, 19)], lay(random(40, 19, seed=9))
    expected = check(run_linear, composed_linear, [x.contiguous() for x in inputs], upstream.contiguous())
    for actual, wanted in zip(check(run_linear, composed_linear, inputs, upstream), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=2e-5)
    inputs = [lay(x) if x.ndim == 2 else x for x in network(40, 12, 19)]
    check(feed_forward, composed_feed_forward, inputs, lay(random(40, 12, seed=9)))


def test_rows_may_have_several_axes(implementation) -> None:
    x, weight, bias, residual = layer(60, 7, 11)
    cube, sums = x.view(3, 4, 5, 7), residual.view(3, 4, 5, 11)
    assert linear(cube, weight, bias, residual=sums).shape == (3, 4, 5, 11)
    torch.testing.assert_close(
        linear(cube, weight, bias, residual=sums).view(60, 11), linear(x, weight, bias, residual=residual)
    )
    inputs = network(60, 6, 19)
    folded = [x.view(3, 20, 6) if len(x) == 60 else x for x in inputs]
    torch.testing.assert_close(feed_forward(*folded).view(60, 6), feed_forward(*inputs))


@pytest.mark.parametrize("rows", [0, 1, 31])
def test_few_rows_give_the_same_result(implementation, rows) -> None:
    x, weight, bias, residual = layer(rows, 7, 11)
    torch.testing.assert_close(
        linear(x, weight, bias, residual=residual), composed_linear(x, weight, bias, residual)
    )
    inputs = network(rows, 6, 19)
    torch.testing.assert_close(feed_forward(*inputs), composed_feed_forward(*inputs))


@pytest.mark.parametrize("shape", [(40, 6), (4, 10, 6)])
def test_residuals_do_not_share_a_gradient(implementation, shape) -> None:
    x, weight, upstream = random(*shape, seed=1), random(6, 6, seed=2), torch.ones(shape)
    network_of = [random(9, 6), random(9), random(6, 9), random(6)]
    for call in (lambda r: linear(x, weight, residual=r), lambda r: feed_forward(x, *network_of, r)):
        residuals = leaves(random(*shape), random(*shape))
        sum(map(call, residuals)).backward(upstream)
        residuals[0].grad.zero_()
        assert torch.equal(residuals[1].grad, torch.ones(shape))
        assert torch.equal(upstream, torch.ones(shape))


@pytest.mark.parametrize("shape", [(40, 6), (4, 10, 6)])
def test_results_may_change_in_place(implementation, shape) -> None:
    x, (weight,) = random(*shape, seed=1), leaves(random(6, 6, seed=2))
    network_of = [random(9, 6), random(9), random(6, 9), random(6)]
    a, b = random(2, 6), random(6, 2)
    for y in (
        linear(x, weight),
        feed_forward(linear(x, weight), *network_of, x),
        lora_linear(linear(x, weight), random(6, 6), None, a, b, 1.0),
    ):
        (found,) = torch.autograd.grad(y.add_(1).sum(), weight)
        assert found.abs().sum() > 0


def test_few_rows_are_the_same_under_autocast(implementation) -> None:
    x, weight, bias, _ = layer(4, 7, 11)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear(x, weight, bias), feed_forward(*network(4, 6, 19))
    torch.testing.assert_close(found, (linear(x, weight, bias), feed_forward(*network(4, 6, 19))))


@pytest.mark.parametrize("asked", range(4))
def test_only_gradients_that_are_asked_for_appear(implementation, asked) -> None:
    inputs, full = layer(40, 9, 13), leaves(*layer(40, 9, 13))
    run_linear(*full).sum().backward()
    inputs[asked].requires_grad_()
    run_linear(*inputs).sum().backward()
    assert [x.grad is not None for x in inputs] == [place == asked for place in range(4)]
    torch.testing.assert_close(inputs[asked].grad, full[asked].grad)


@pytest.mark.parametrize("asked", range(6))
def test_the_feed_forward_gives_the_gradients_asked_for(implementation, asked) -> None:
    inputs, full = network(40, 9, 13), leaves(*network(40, 9, 13))
    feed_forward(*full).sum().backward()
    inputs[asked].requires_grad_()
    feed_forward(*inputs).sum().backward()
    assert [x.grad is not None for x in inputs] == [place == asked for place in range(6)]
    torch.testing.assert_close(inputs[asked].grad, full[asked].grad)


def test_inputs_stay_as_they_were_and_every_run_gives_the_same_bits(implementation) -> None:
    counts = (1, 1) if implementation == "torch" else (1, 2, 3)  # MKL's bits depend on the threads
    first, second = layer(1500, 70, 150), network(700, 64, 300)
    before = [x.clone() for x in (*first, *second)]
    threads, runs = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            left, right = leaves(*first), leaves(*second)
            results = run_linear(*left), feed_forward(*right)
            for result in results:
                result.square().sum().backward()
            runs.append([*results, *(x.grad for x in (*left, *right))])
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(runs[0], other, strict=True))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip((*first, *second), before, strict=True))


def rounded_results(
    call: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor, **options
) -> list[Tensor]:
    given = leaves(*inputs)
    y = call(*given, **options)
    y.backward(upstream.to(y.dtype))
    return [y, *(leaf.grad for leaf in given)]


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def test_half_loses_at_most_what_bfloat16_operands_lose(implementation) -> None:
    x, weight, bias, residual = layer(40, 133, 37)
    upstream = random(40, 37, seed=9)
    found = rounded_results(
        lambda x, w, b, r: linear(x, w, b, residual=r, operands="half"), [x, weight, bias, residual], upstream
    )
    wide = [t.double() for t in (x, weight, upstream)]
    rounded = [t.bfloat16().double() for t in (x, weight, upstream)]
    share = 1 / 8 if implementation == "native" else 1.01
    if (multiplies_bfloat16 if implementation == "torch" else has_matrix_units)(x.device):
        # what comes out is rounded too
        share = 2
    products = [lambda x, w, g: x @ w.t(), lambda x, w, g: g @ w, lambda x, w, g: g.t() @ x]
    shifts = [bias.double() + residual.double(), 0, 0]
    for result, product, shift in zip(found, products, shifts, strict=False):
        exact = product(*wide) + shift
        assert result.dtype == torch.float32
        assert 1e-6 < distance(result, exact) <= share * distance(product(*rounded) + shift, exact)
    torch.testing.assert_close(found[3], upstream.sum(0), rtol=0, atol=2e-5)  # of what was not rounded
    assert torch.equal(found[4], upstream)


@pytest.mark.parametrize("rows", [1, 40])
def test_int8_products_are_those_of_bytes_forward_and_backward(implementation, rows) -> None:
    x, weight, bias, residual = layer(rows, 133, 37)
    upstream = random(rows, 37, seed=9)
    found = rounded_results(
        lambda x, w, b, r: linear(x, w, b, residual=r, operands="int8"), [x, weight, bias, residual], upstream
    )

    def product(a: Tensor, b: Tensor) -> Tensor:
        return in_bytes(a.double(), 1) @ in_bytes(b.double(), 0)

    exact = [
        product(x, weight.t()) + bias.double() + residual.double(),
        product(upstream, weight),
        product(upstream.t(), x),
    ]
    for result, wanted in zip(found, exact, strict=False):
        assert result.dtype == torch.float32
        assert distance(result, wanted) < 1e-3  # some lie between two bytes; rounded otherwise: 0.008
    torch.testing.assert_close(found[3], upstream.sum(0), rtol=0, atol=2e-5)
    assert torch.equal(found[4], upstream)


def test_rounding_reaches_every_product_of_the_feed_forward(implementation) -> None:
    inputs, upstream = network(40, 64, 133), random(40, 64, seed=9)
    wide = leaves(*inputs, dtype=torch.float64)
    feed_forward(*wide).backward(upstream.double())
    exact = [feed_forward(*wide), *(leaf.grad for leaf in wide)]
    half = 1e-3 if implementation == "native" and not has_matrix_units(upstream.device) else 1e-2
    for operands, least, most in (("half", 2e-6, half), ("int8", 2e-3, 4e-2)):
        found = rounded_results(partial(feed_forward, operands=operands), inputs, upstream)
        for place, (result, wanted) in enumerate(zip(found, exact, strict=True)):
            products_in_it = place not in (5, 6)  # the gradients of the last bias and of the residual
            away = distance(result, wanted)
            assert (least <= away < most) if products_in_it else away < 1e-6


@pytest.mark.skipif(not cpu.built, reason="no native code for this machine was built")
def test_where_a_cpu_has_matrix_units_half_products_are_left_to_torch(monkeypatch) -> None:
    monkeypatch.setattr(reference, "_AMX", True)
    x, weight, bias, _ = layer(40, 133, 37)
    packed, low_rank = quantize_nf4(weight), (random(8, 133), random(37, 8))
    with running("native"):
        assert torch.equal(linear(x, weight, bias), cpu.product(x, weight.t(), bias))
        monkeypatch.setattr(cpu, "_product", None)  # to call it is an error
        assert distance(linear(x, weight, bias, operands="half"), functional.linear(x, weight, bias)) < 1e-2
        nf4_linear(x, packed, bias, operands="half")
        lora_linear(x, weight, bias, *low_rank, 1.0, operands="half")
        lora_linear(x, packed, bias, *low_rank, 1.0, operands="half")


def test_float64_is_exact_and_differentiates(implementation) -> None:
    inputs = [x.double().requires_grad_() for x in layer(33, 3, 4)]
    assert torch.autograd.gradcheck(run_linear, inputs, fast_mode=True)
    assert torch.autograd.gradcheck(
        feed_forward, [x.double().requires_grad_() for x in network(33, 3, 4)], fast_mode=True
    )


def test_what_is_not_finite_is_not_lost(implementation) -> None:
    x, weight, bias, residual = layer(40, 20, 20)
    x[3, 4] = torch.nan
    broken = linear(x, weight, bias, residual=residual).isnan().any(1)
    assert broken.nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight": torch.ones(4, 2)},
            r"linear: weight is torch.float32 \[4, 2\] on cpu; make it torch.float32 \[4, 3\]",
        ),
        ({"bias": torch.ones(3)}, r"bias is torch.float32 \[3\]"),
        ({"residual": torch.ones(1, 4)}, r"residual is torch.float32 \[1, 4\]"),
        ({"weight": torch.ones(4, 3).double()}, r"weight is torch.float64"),
        ({"x": torch.ones(2, 3, dtype=torch.int64)}, r"x is torch.int64; convert"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message) -> None:
    arguments = {"x": torch.ones(2, 3), "weight": torch.ones(4, 3), "bias": torch.ones(4), "residual": None}
    with pytest.raises(ValueError, match=message):
        linear(**(arguments | change))


def test_the_operators_are_sound() -> None:
    x, weight, bias, residual = leaves(*layer(33, 6, 5))
    torch.library.opcheck(_linear, (x, weight, bias, residual, "full"))
    torch.library.opcheck(_linear, (x.detach(), weight, None, None, "int8"))
    upstream = random(5, 33, seed=9).t()
    detached = [t.detach() for t in (x, weight)]
    torch.library.opcheck(_linear_backward, (upstream, *detached, [True, False, True], "half"))
    inputs = leaves(*network(33, 6, 5))
    torch.library.opcheck(_feed_forward, (*inputs, "full"))
    z, values = random(33, 5, seed=8), [t.detach() for t in inputs]
    arguments = (values[5], values[0], z, values[1], values[3], [True] * 5, "full")
    torch.library.opcheck(_feed_forward_backward, arguments)


def test_compiling_changes_nothing() -> None:
    for call, make in ((run_linear, layer), (feed_forward, network)):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        first, second = leaves(*make(40, 6, 8)), leaves(*make(40, 6, 8))
        call(*first).sum().backward()
        compiled(*second).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiling_with_a_frozen_weight_changes_nothing(dynamic) -> None:
    torch.compiler.reset()
    x, weight, bias, _ = layer(40, 6, 8)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    first, second = leaves(x, bias), leaves(x, bias)
    linear(first[0].view(4, 10, 6), weight, first[1]).sum().backward()
    compiled(second[0].view(4, 10, 6), weight, second[1]).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(first, second, strict=True))


def fold(tensors: list[Tensor]) -> list[Tensor]:
    """40 rows as 4 of 10."""
    return [x.unflatten(0, (4, 10)) if len(x) == 40 else x for x in tensors]


def test_products_are_counted() -> None:
    with flop_counter(display=False) as counter:
        run_linear(*fold(leaves(*layer(40, 6, 8)))).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 40 * 6 * 8
    with flop_counter(display=False) as counter:
        feed_forward(*fold(leaves(*network(40, 6, 8)))).sum().backward()
    assert counter.get_total_flops() == 6 * 2 * 40 * 6 * 8
