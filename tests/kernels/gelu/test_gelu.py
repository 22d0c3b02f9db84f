"""GELU of x + bias: every implementation against the definition in float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.gelu import _gelu, _gelu_backward, cpu, gelu, triton_gelu
from tests.kernels.cases import (
    DTYPES,
    IMPLEMENTATIONS,
    LAYOUTS,
    assert_as_exact_as,
    bits,
    concatenated,
    every_other,
    far_apart,
    leaves,
    permuted,
    random,
    running,
)

SHAPES = [(0, 5), (1, 1), (15, 7), (16, 128), (17, 129), (2, 3, 127), (67, 9), (131,)]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    if request.param == "native" and cpu._forward is None:
        pytest.skip("no native code was built")
    with running(request.param):
        yield request.param


def separate(x: Tensor, bias: Tensor | None) -> Tensor:
    return functional.gelu(x if bias is None else x + bias)


def check(x: Tensor, bias: Tensor | None, upstream: Tensor) -> list[Tensor | None]:
    """Our result and gradients, held against torch's own and float64."""
    ours, torchs, exact = leaves(x, bias), leaves(x, bias), leaves(x, bias, dtype=torch.float64)
    results = [call(*inputs) for call, inputs in ((gelu, ours), (separate, torchs), (separate, exact))]
    assert results[0].dtype == x.dtype
    assert results[0].is_contiguous()
    assert_as_exact_as(*results, 2, "forward")
    for result in results:
        result.backward(upstream.to(result.dtype))
    for name, *found in zip(("dx", "dbias"), ours, torchs, exact, strict=True):
        if found[0] is not None:
            assert_as_exact_as(*(leaf.grad for leaf in found), 3, name)
    return [results[0].detach(), *(None if leaf is None else leaf.grad for leaf in ours)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_as_exact_as_torchs(implementation, shape, dtype) -> None:
    x, upstream = random(*shape, dtype=dtype, scale=2), random(*shape, seed=1, dtype=dtype)
    check(x, random(shape[-1], seed=2, dtype=dtype), upstream)
    check(x, None, upstream)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_the_input_and_of_the_upstream_gradient_will_do(implementation, layout) -> None:
    lay = LAYOUTS[layout]
    x, upstream, bias = random(19, 37), random(19, 37, seed=1), random(37, seed=2)
    expected = check(lay(x).contiguous(), bias, lay(upstream).contiguous())
    for actual, wanted in zip(check(lay(x), bias, lay(upstream)), expected, strict=True):
        assert torch.equal(bits(actual), bits(wanted))


def test_input_and_upstream_gradient_have_their_own_layouts(implementation) -> None:
    x, upstream, bias = random(19, 37), random(19, 37, seed=1), random(37, seed=2)
    check(concatenated(x), bias, permuted(upstream))
    check(x, bias, every_other(upstream))


def test_the_sum_with_the_bias_is_not_rounded(implementation) -> None:
    x, bias = torch.tensor([[-3.0]]).bfloat16(), torch.tensor([0.005]).bfloat16()
    exact = functional.gelu(x.double() + bias.double())
    torch.testing.assert_close(gelu(x, bias).double(), exact, rtol=2**-8, atol=0)


@pytest.mark.skipif(cpu._forward is None, reason="no native code was built")
def test_compiled_code_rounds_every_bfloat16_value_as_nearly_exact_ones_round() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[(x.abs() > 2**-100) & (x.abs() < 13)].requires_grad_()  # where results are no subnormal numbers
    z = x.detach().double()
    cdf = torch.special.erfc(-z / math.sqrt(2)) / 2
    slope = cdf + z * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    y = gelu(x)
    y.backward(torch.ones_like(y))
    cancelled = 2e-5  # the derivative's terms are opposite at -0.75
    for actual, exact, beside in ((y.detach(), z * cdf, 0), (x.grad, slope, cancelled)):
        last_place = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 8)
        assert bool(((actual.double() - exact).abs() <= 0.505 * last_place + beside).all())


def test_rows_beyond_two_billion_elements_are_found(implementation) -> None:
    x, upstream = (far_apart(random(2, 16, seed=seed, dtype=torch.bfloat16)) for seed in (0, 1))
    check(x, random(16, dtype=torch.bfloat16), upstream)


def test_a_scalar_has_a_gelu(implementation) -> None:
    assert float(gelu(torch.tensor(1.0))) == pytest.approx(0.8413447, abs=1e-6)


def test_rows_are_walked_in_several_tiles(monkeypatch) -> None:
    monkeypatch.setattr(triton_gelu, "PARTS", 2)
    with running("triton"):
        check(random(90, 5), random(5, seed=2), random(90, 5, seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_stay_what_they_are(implementation, dtype) -> None:
    x = torch.tensor([3e38, 1e20, 100.0, 14.0, 1e-30, 0.0, -0.0, -1e-30, -14.0, -100.0, -1e20, -3e38])
    x = torch.cat([x, x]).to(dtype)  # a whole vector, and more
    actual = gelu(x.requires_grad_())
    expected = functional.gelu(x.double())  # in float32 torch overflows at the first with AVX-512
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-35)
    actual.backward(torch.ones_like(actual))
    slope = (x.detach() > 1).float() + 0.5 * (x.detach().abs() < 1)
    torch.testing.assert_close(x.grad.float(), slope, rtol=0, atol=1e-6)
    assert bool(gelu(torch.tensor([math.nan, 1.0], dtype=dtype)).isnan().equal(torch.tensor([True, False])))


@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)])
def test_only_gradients_that_are_asked_for_appear(implementation, needed) -> None:
    inputs = [random(5, 9), random(9, seed=1)]
    full = leaves(*inputs)
    gelu(*full).sum().backward()
    some = [x.requires_grad_(need) for x, need in zip(inputs, needed, strict=True)]
    result = gelu(*some)
    assert result.requires_grad == any(needed)
    if any(needed):
        result.sum().backward()
    for leaf, reference, need in zip(some, full, needed, strict=True):
        assert (leaf.grad is not None) == need
        assert not need or torch.equal(leaf.grad, reference.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_stay_as_they_were_and_every_run_gives_the_same_bits(implementation, dtype) -> None:
    inputs = [
        random(150, 33, dtype=dtype),
        random(33, seed=1, dtype=dtype),
        random(150, 33, seed=2, dtype=dtype),
    ]
    inputs = [x[:20] if implementation == "triton" and x.dim() > 1 else x for x in inputs]
    before = [x.clone() for x in inputs]
    runs = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, threads):
            torch.set_num_threads(count)
            x, bias, upstream = (
                inputs[0].detach().requires_grad_(),
                inputs[1].detach().requires_grad_(),
                inputs[2],
            )
            gelu(x, bias).backward(upstream)
            runs.append([gelu(x, bias), x.grad, bias.grad])
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(runs[0], other, strict=True))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(inputs, before, strict=True))


def test_the_bias_may_have_another_dtype_than_the_input(implementation) -> None:
    x, bias = random(7, 40, dtype=torch.bfloat16).requires_grad_(), random(40, seed=1).requires_grad_()
    result = gelu(x, bias)
    result.backward(torch.ones_like(result))
    assert (result.dtype, x.grad.dtype, bias.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    exact = functional.gelu(x.double() + bias.double())
    torch.testing.assert_close(result.double(), exact, atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_run_in_torch(implementation, dtype) -> None:
    x, bias = random(3, 5).to(dtype).requires_grad_(), random(5, seed=1).to(dtype).requires_grad_()
    gelu(x, bias).sum().backward()
    exact = leaves(x, bias, dtype=torch.float64)
    separate(*exact).sum().backward()
    for ours, wanted in zip((x, bias), exact, strict=True):
        torch.testing.assert_close(
            ours.grad.double(), wanted.grad, rtol=8 * torch.finfo(dtype).eps, atol=1e-3
        )
        if dtype == torch.float64:
            torch.testing.assert_close(ours.grad, wanted.grad)


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"x is torch.int64; convert"):
        gelu(torch.arange(3))
    with pytest.raises(ValueError, match=r"bias has shape \[4\]; give it that of x's last axis, \[3\]"):
        gelu(torch.ones(2, 3), torch.ones(4))


def test_compiled_code_and_triton_cover_float32_and_bfloat16() -> None:
    for dtype in DTYPES:
        x = random(2, 3, dtype=dtype)
        if cpu._forward is not None:
            assert cpu.forward(x, None) is not NotImplemented
            assert cpu.backward(x, x, None) is not NotImplemented
        with running("triton"):
            assert triton_gelu.forward(x, None) is not NotImplemented
            assert triton_gelu.backward(x, x, None) is not NotImplemented


@pytest.mark.parametrize("bias", [None, random(6, seed=1).requires_grad_()])
def test_the_operators_are_sound(bias) -> None:
    x = random(6, 5).t().requires_grad_()
    torch.library.opcheck(_gelu, (x, bias))
    detached = None if bias is None else bias.detach()
    torch.library.opcheck(_gelu_backward, (random(6, 5, seed=2).t(), x.detach(), detached))
    row = None if bias is None else random(6, dtype=torch.float64)
    torch.library.opcheck(_gelu_backward, (*[random(6, dtype=torch.float64)] * 2, row))


def test_compiling_changes_nothing() -> None:
    first, second = leaves(random(4, 6), random(6, seed=1)), leaves(random(4, 6), random(6, seed=1))
    expected = gelu(*first)
    actual = torch.compile(gelu, fullgraph=True, backend="aot_eager")(*second)
    expected.sum().backward()
    actual.sum().backward()
    assert torch.equal(actual, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(first, second, strict=True))
