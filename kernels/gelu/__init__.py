"""GELU, the exact form z Phi(z) with the normal distribution's Phi, of x + bias in one pass over memory."""

from typing import Any

from torch import Tensor

from kernels import operators
from kernels.dispatch import Operation
from kernels.gelu import cpu, reference

__all__ = ["gelu"]


def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """0.5 z (1 + erf(z / sqrt(2))) of z = x + bias; x `[..., F]`, bias `[F]`, a contiguous result like x.

    float32 and bfloat16 run in compiled code and are computed in float32; the sum x + bias is not rounded.
    The gradient of the bias is summed in float32 in an order that depends only on the shape. ValueError for
    other than floating-point tensors and for a bias that is not of the last axis.
    """
    if not x.dtype.is_floating_point:
        raise ValueError(f"gelu: x is {x.dtype}; convert it to a floating-point dtype first")
    if bias is not None and (x.dim() == 0 or bias.shape != x.shape[-1:]):
        last = list(x.shape[-1:])
        raise ValueError(f"gelu: bias has shape {list(bias.shape)}; give it that of x's last axis, {last}")
    return _gelu(x, bias)


def _triton_forward(x: Tensor, bias: Tensor | None) -> Tensor:
    from kernels.gelu import triton_gelu

    return triton_gelu.forward(x, bias)


def _triton_backward(gradient: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    from kernels.gelu import triton_gelu

    return triton_gelu.backward(gradient, x, bias)


def _fake_forward(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


def _fake_backward(gradient: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0) if bias is None else bias.new_empty(bias.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    x, bias = ctx.saved_tensors
    dx, dbias = _gelu_backward(gradient, x, bias)
    return dx, None if bias is None else dbias


_gelu_backward = operators.define(
    "gelu_backward(Tensor gradient, Tensor x, Tensor? bias) -> (Tensor, Tensor)",
    Operation("gelu_backward", torch=reference.backward, native=cpu.backward, triton=_triton_backward),
    fake=_fake_backward,
)
_gelu = operators.define(
    "gelu(Tensor x, Tensor? bias) -> Tensor",
    Operation("gelu", torch=reference.forward, native=cpu.forward, triton=_triton_forward),
    fake=_fake_forward,
    backward=_differentiate,
    setup_context=_remember,
)
