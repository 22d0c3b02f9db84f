"""Layer norm, alone and after a residual sum: every implementation against the definition in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.layer_norm import _layer_norm, _layer_norm_backward, cpu, layer_norm, triton_layer_norm
from tests.kernels.cases import (
    DTYPES,
    IMPLEMENTATIONS,
    LAYOUTS,
    assert_as_exact_as,
    bits,
    concatenated,
    far_apart,
    leaves,
    permuted,
    random,
    running,
)

SHAPES = [(0, 5), (1, 1), (3, 7), (2, 2, 32), (16, 33), (17, 127), (7, 128), (67, 19), (5,)]
NAMES = ("dx", "dscale", "dbias", "dresidual")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    if request.param == "native" and cpu._forward is None:
        pytest.skip("no native code was built")
    with running(request.param):
        yield request.param


def ours(x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor | None) -> list[Tensor]:
    results = layer_norm(x, scale, bias, 1e-5, residual)
    return [results] if residual is None else list(results)


def separate(x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor | None) -> list[Tensor]:
    total = x if residual is None else x + residual
    normed = functional.layer_norm(total, scale.shape, scale, bias, 1e-5)
    return [normed] if residual is None else [normed, total]


def check(inputs: list[Tensor | None], upstream: list[Tensor]) -> list[Tensor]:
    """Our results and gradients, held against torch's own and float64."""
    kinds = [leaves(*inputs), leaves(*inputs), leaves(*inputs, dtype=torch.float64)]
    results = [call(*given) for call, given in zip((ours, separate, separate), kinds, strict=True)]
    for name, *found in zip(("normed", "total"), *results, strict=False):
        assert found[0].dtype == inputs[0].dtype
        assert found[0].is_contiguous()
        assert_as_exact_as(*found, 2, name)
    for result in results:
        torch.autograd.backward(result, [g.to(result[0].dtype) for g in upstream[: len(result)]])
    for name, *found in zip(NAMES, *kinds, strict=True):
        if found[0] is not None:
            assert_as_exact_as(*(leaf.grad for leaf in found), 3, name)
    return [x.detach() for x in results[0]] + [leaf.grad for leaf in kinds[0] if leaf is not None]


def inputs(*shape: int, dtype: torch.dtype = torch.float32, fused: bool = True) -> list[Tensor | None]:
    scale, bias = (random(shape[-1], seed=seed, dtype=dtype) for seed in (1, 2))
    return [random(*shape, dtype=dtype), scale, bias, random(*shape, seed=3, dtype=dtype) if fused else None]


def gradients(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [random(*shape, seed=seed, dtype=dtype) for seed in (4, 5)]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "alone"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_as_exact_as_torchs(implementation, shape, dtype, fused) -> None:
    check(inputs(*shape, dtype=dtype, fused=fused), gradients(*shape, dtype=dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_the_inputs_and_of_the_upstream_gradients_will_do(implementation, layout) -> None:
    lay = LAYOUTS[layout]
    x, scale, bias, residual = inputs(19, 21)
    upstream = gradients(19, 21)
    plain = [lay(x).contiguous(), scale, bias, lay(residual).contiguous()]
    expected = check(plain, [lay(g).contiguous() for g in upstream])
    wide_scale = torch.stack([scale, scale], -1)[..., 0]
    actual = check([lay(x), wide_scale, bias, lay(residual)], [lay(g) for g in upstream])
    for found, wanted in zip(actual, expected, strict=True):
        assert torch.equal(bits(found), bits(wanted))


def test_every_tensor_has_its_own_layout(implementation) -> None:
    x, scale, bias, residual = inputs(19, 21)
    upstream = gradients(19, 21)
    check([concatenated(x), scale, bias, permuted(residual)], [upstream[0], concatenated(upstream[1])])
    check([x, scale, bias, concatenated(residual)], [concatenated(upstream[0]), upstream[1]])


def test_rows_beyond_two_billion_elements_are_found(implementation) -> None:
    x, scale, bias, residual = inputs(2, 16, dtype=torch.bfloat16)
    upstream = [far_apart(g) for g in gradients(2, 16, dtype=torch.bfloat16)]
    check([far_apart(x), scale, bias, far_apart(residual)], upstream)


def test_rows_are_walked_in_several_tiles(monkeypatch) -> None:
    monkeypatch.setattr(triton_layer_norm, "PARTS", 2)
    with running("triton"):
        check(inputs(70, 5), gradients(70, 5))


def test_rows_wider_than_triton_holds_run_in_torch(monkeypatch) -> None:
    monkeypatch.setattr(triton_layer_norm, "WIDEST", 8)
    with running("triton"):
        check(inputs(3, 9), gradients(3, 9))


def test_the_variance_is_exact_far_from_zero(implementation) -> None:
    x, scale, bias, _ = inputs(4, 64, fused=False)
    check([x + 1000.0, scale, bias, None], gradients(4, 64))
    x[:] = 7.0
    assert torch.equal(layer_norm(x, scale, bias, 1e-5), bias.expand(4, 64))


def test_the_population_variance_divides_by_the_width(implementation) -> None:
    normed = layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.zeros(2), 1e-12)
    torch.testing.assert_close(normed, torch.tensor([[-1.0, 1.0]]))


def test_the_norm_is_that_of_the_rounded_sum(implementation) -> None:
    x, scale, bias, residual = inputs(6, 40, dtype=torch.bfloat16)
    normed, total = layer_norm(x, scale, bias, 1e-5, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, layer_norm(total, scale, bias, 1e-5))


@pytest.mark.parametrize("which", [0, 1], ids=["normed", "sum"])
def test_either_result_may_go_without_a_gradient(implementation, which) -> None:
    kinds = [leaves(*inputs(5, 9)), leaves(*inputs(5, 9), dtype=torch.float64)]
    upstream = gradients(5, 9)[which]
    ours(*kinds[0])[which].backward(upstream)
    separate(*kinds[1])[which].backward(upstream.double())
    for leaf, exact in zip(*kinds, strict=True):
        wanted = torch.zeros_like(exact) if exact.grad is None else exact.grad
        torch.testing.assert_close(leaf.grad.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("needed", range(16))
def test_only_gradients_that_are_asked_for_appear(needed) -> None:
    full, some = leaves(*inputs(5, 9)), inputs(5, 9)
    torch.autograd.backward(ours(*full), gradients(5, 9))
    for position, leaf in enumerate(some):
        leaf.requires_grad_(bool(needed >> position & 1))
    results = ours(*some)
    asked = [pair for pair in zip(results, gradients(5, 9), strict=True) if pair[0].requires_grad]
    assert bool(asked) == bool(needed)
    if asked:
        torch.autograd.backward(*map(list, zip(*asked, strict=True)))
    for leaf, reference in zip(some, full, strict=True):
        assert (leaf.grad is not None) == leaf.requires_grad
        assert leaf.grad is None or torch.equal(leaf.grad, reference.grad)


def test_a_gradient_with_two_consumers_is_not_spoiled(implementation) -> None:
    x, scale, bias, residual = leaves(*inputs(5, 9))
    torch.autograd.backward(ours(x, scale, bias, residual), gradients(5, 9))
    assert torch.equal(x.grad, residual.grad)
    x.grad.zero_()
    assert bool(residual.grad.abs().sum() > 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_stay_as_they_were_and_every_run_gives_the_same_bits(implementation, dtype) -> None:
    shape = (20, 33) if implementation == "triton" else (700, 33)
    given, upstream = inputs(*shape, dtype=dtype), gradients(*shape, dtype=dtype)
    before = [x.clone() for x in (*given, *upstream)]
    threads, runs = torch.get_num_threads(), []
    try:
        for count in (1, 2, threads):
            torch.set_num_threads(count)
            run = leaves(*given)
            results = ours(*run)
            torch.autograd.backward(results, upstream)
            runs.append([*results, *(leaf.grad for leaf in run)])
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(runs[0], other, strict=True))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip((*given, *upstream), before, strict=True))


def test_scale_and_bias_may_have_another_dtype_than_the_input(implementation) -> None:
    x, scale, bias, _ = inputs(7, 40)
    leaf, scale, bias = leaves(x.bfloat16(), scale, bias)
    result = layer_norm(leaf, scale, bias, 1e-5)
    result.sum().backward()
    dtypes = (result.dtype, leaf.grad.dtype, scale.grad.dtype, bias.grad.dtype)
    assert dtypes == (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    exact = functional.layer_norm(leaf.double(), (40,), scale.double(), bias.double(), 1e-5)
    torch.testing.assert_close(result.double(), exact, atol=1e-6, rtol=2**-8)


def test_float64_runs_in_torch(implementation) -> None:
    kinds = [leaves(*inputs(5, 9), dtype=torch.float64) for _ in range(2)]
    upstream = [g.double() for g in gradients(5, 9)]
    results = ours(*kinds[0]), separate(*kinds[1])
    for result in results:
        torch.autograd.backward(result, upstream)
    torch.testing.assert_close(results[0], results[1])
    for mine, wanted in zip(*kinds, strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 3, dtype=torch.int32)}, "x is torch.int32; convert"),
        ({"x": torch.ones(2, 0)}, r"x has shape \[2, 0\]; its last axis"),
        ({"scale": torch.ones(4)}, r"scale has shape \[4\]; give it x's last axis, \[3\]"),
        ({"bias": torch.ones(1, 3)}, r"bias has shape \[1, 3\]"),
        ({"residual": torch.ones(2, 4)}, r"residual is \[2, 4\] torch.float32; make it like x, \[2, 3\]"),
        ({"residual": torch.ones(2, 3).double()}, "residual is .* torch.float64; make it like x"),
        ({"epsilon": 0.0}, "epsilon is 0.0; it must be above 0"),
        ({"epsilon": float("nan")}, "epsilon is nan"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message) -> None:
    arguments = {"x": torch.ones(2, 3), "scale": torch.ones(3), "bias": torch.ones(3), "epsilon": 1e-5}
    with pytest.raises(ValueError, match=message):
        layer_norm(**(arguments | change))


def test_compiled_code_and_triton_cover_float32_and_bfloat16() -> None:
    for dtype in DTYPES:
        x, scale, bias, residual = inputs(2, 3, dtype=dtype)
        for name, module in (("native", cpu), ("triton", triton_layer_norm)):
            if module is cpu and cpu._forward is None:
                continue
            with running(name):
                found = module.forward(x, residual, scale, bias, 1e-5)
                assert found is not NotImplemented
                assert module.backward(x, None, *found[1:], scale, bias) is not NotImplemented


@pytest.mark.parametrize("fused", [True, False])
def test_the_operators_are_sound(fused) -> None:
    x, scale, bias, residual = leaves(*inputs(5, 6))
    torch.library.opcheck(_layer_norm, (x.t(), residual.t() if fused else None, scale[:5], bias[:5], 1e-5))
    total, mean = x.detach().t(), random(6, seed=7)
    parameters = scale.detach()[:5], bias.detach()[:5]
    extra = random(6, 5) if fused else None
    torch.library.opcheck(_layer_norm_backward, (total, extra, total, mean, mean, *parameters))


def test_compiling_changes_nothing() -> None:
    kinds = [leaves(*inputs(5, 9)) for _ in range(2)]
    compiled = torch.compile(layer_norm, fullgraph=True, backend="aot_eager")
    for call, (x, scale, bias, residual) in zip((layer_norm, compiled), kinds, strict=True):
        torch.autograd.backward(call(x, scale, bias, 1e-5, residual), gradients(5, 9))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*kinds, strict=True))
