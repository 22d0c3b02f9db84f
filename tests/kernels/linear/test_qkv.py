"""Three linear layers at once are three linear layers."""

import pytest
import torch
from torch import Tensor

from kernels import linear, qkv_linear
from kernels.linear import cpu
from kernels.linear.qkv import _qkv_linear, _qkv_linear_backward
from kernels.operators import flop_counter
from tests.kernels.cases import leaves, random, running


@pytest.fixture(params=("torch", "native"))
def implementation(request):
    if request.param == "native" and not cpu.built:
        pytest.skip("no native code for this machine was built")
    with running(request.param):
        yield request.param


def inputs(rows: int = 40, width: int = 70, out: int = 33) -> list[Tensor]:
    """x `[rows, width]`, and a weight and a bias three times."""
    layers = [(random(out, width, seed=2 * i + 1), random(out, seed=2 * i + 2)) for i in range(3)]
    return [random(rows, width), *(tensor for layer in layers for tensor in layer)]


def separate(x: Tensor, *layers: Tensor, operands="full") -> tuple[Tensor, ...]:
    return tuple(linear(x, layers[i], layers[i + 1], operands=operands) for i in (0, 2, 4))


def upstream(results: tuple[Tensor, ...]) -> list[Tensor]:
    return [random(*result.shape, seed=10 + i) for i, result in enumerate(results)]


@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("operands", ["full", "half", "int8"])
def test_values_and_gradients_are_those_of_three_layers(implementation, operands, rows) -> None:
    ours, theirs = leaves(*inputs(rows)), leaves(*inputs(rows))
    found, wanted = qkv_linear(*ours, operands=operands), separate(*theirs, operands=operands)
    torch.autograd.backward(found, upstream(found))
    torch.autograd.backward(wanted, upstream(wanted))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("asked", range(7))
def test_only_gradients_that_are_asked_for_appear(implementation, asked) -> None:
    given, full = inputs(), leaves(*inputs())
    sum(y.square().sum() for y in qkv_linear(*full)).backward()
    given[asked].requires_grad_()
    sum(y.square().sum() for y in qkv_linear(*given)).backward()
    assert [x.grad is not None for x in given] == [place == asked for place in range(7)]
    torch.testing.assert_close(given[asked].grad, full[asked].grad, rtol=1e-5, atol=1e-4)


def test_what_is_not_used_adds_nothing(implementation) -> None:
    ours, theirs = leaves(*inputs()), leaves(*inputs())
    qkv_linear(*ours)[1].sum().backward()
    separate(*theirs)[1].sum().backward()
    torch.testing.assert_close(ours[0].grad, theirs[0].grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ours[3].grad, theirs[3].grad)
    assert not ours[1].grad.any()


def test_upstream_gradients_are_left_as_they_are(implementation) -> None:
    """The gradient of x is summed in place, but not in what others may have too."""
    given = leaves(*inputs(out=70))
    found = qkv_linear(*given)
    above = upstream(found)
    before = [each.clone() for each in above]
    torch.autograd.backward(found, above)
    assert all(torch.equal(one, other) for one, other in zip(above, before, strict=True))


def test_what_does_not_fit_is_refused_by_name() -> None:
    given = inputs()
    given[4] = random(32)
    with pytest.raises(ValueError, match=r"key_bias is torch.float32 \[32\].*make it torch.float32 \[33\]"):
        qkv_linear(*given)


def test_the_operators_are_sound() -> None:
    given = leaves(*inputs(6, 5, 4))
    torch.library.opcheck(_qkv_linear, (*given, "full"))
    x, *layers = [tensor.detach() for tensor in given]
    gradients = [random(6, 4, seed=i) for i in range(3)]
    asked = [True, True, False, False, True, True, True]
    torch.library.opcheck(_qkv_linear_backward, (gradients, x, layers[::2], asked, "half"))


def test_compiling_changes_nothing_and_products_are_counted() -> None:
    compiled = torch.compile(qkv_linear, fullgraph=True, backend="aot_eager")
    first, second = leaves(*inputs()), leaves(*inputs())
    with flop_counter(display=False) as counter:
        sum(y.sum() for y in qkv_linear(*first)).backward()
    assert counter.get_total_flops() == 9 * 2 * 40 * 70 * 33
    sum(y.sum() for y in compiled(*second)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(first, second, strict=True))
