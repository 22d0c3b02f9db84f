"""Layer norm with scale and bias over the last axis, with the residual sum before it in the same pass."""

from typing import Any, overload

import torch
from torch import Tensor

from kernels import operators
from kernels.dispatch import Operation
from kernels.layer_norm import cpu, reference

__all__ = ["layer_norm"]


@overload
def layer_norm(x: Tensor, scale: Tensor, bias: Tensor, epsilon: float, residual: None = None) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor, epsilon: float, residual: Tensor
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor, epsilon: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """(x - mean) / sqrt(population variance + epsilon) * scale + bias; with a residual that of x + residual.

    x and residual `[..., D]` of one dtype, scale and bias `[D]` of any floating dtype. Returns the normed
    rows like x, and with a residual also the sum x + residual, which the norm sees as rounded to the dtype
    of x. Statistics and the gradients of scale and bias are summed in float32 in an order that depends only
    on the shape. ValueError for shapes or dtypes that do not fit and for an epsilon that is not positive.
    """
    _check(x, scale, bias, epsilon, residual)
    normed, total, _, _ = _layer_norm(x, residual, scale, bias, epsilon)
    return normed if residual is None else (normed, total)


def _check(x: Tensor, scale: Tensor, bias: Tensor, epsilon: float, residual: Tensor | None) -> None:
    if not x.dtype.is_floating_point:
        raise ValueError(f"layer_norm: x is {x.dtype}; convert it to a floating-point dtype first")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"layer_norm: x has shape {list(x.shape)}; its last axis must hold something")
    for name, value in (("scale", scale), ("bias", bias)):
        if value.shape != x.shape[-1:]:
            last = list(x.shape[-1:])
            raise ValueError(
                f"layer_norm: {name} has shape {list(value.shape)}; give it x's last axis, {last}"
            )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        given = f"{list(residual.shape)} {residual.dtype}"
        raise ValueError(f"layer_norm: residual is {given}; make it like x, {list(x.shape)} {x.dtype}")
    if not epsilon > 0:
        raise ValueError(f"layer_norm: epsilon is {epsilon}; it must be above 0")


def _triton_forward(*arguments: Any) -> Any:
    from kernels.layer_norm import triton_layer_norm

    return triton_layer_norm.forward(*arguments)


def _triton_backward(*arguments: Any) -> Any:
    from kernels.layer_norm import triton_layer_norm

    return triton_layer_norm.backward(*arguments)


def _fake_forward(
    x: Tensor, residual: Tensor | None, scale: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean, rstd = (x.new_empty(x.shape[:-1].numel(), dtype=wide) for _ in range(2))
    return x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape), mean, rstd


def _fake_backward(
    gradient: Tensor,
    sum_gradient: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return total.new_empty(total.shape), scale.new_empty(scale.shape), bias.new_empty(bias.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, scale, bias, _ = inputs
    _, total, mean, rstd = output
    ctx.fused = residual is not None
    ctx.mark_non_differentiable(mean, rstd, *([] if ctx.fused else [total]))
    ctx.save_for_backward(total if ctx.fused else x, mean, rstd, scale, bias)


def _differentiate(
    ctx: Any, gradient: Tensor | None, sum_gradient: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    total, mean, rstd, scale, bias = ctx.saved_tensors
    if gradient is None:
        gradient = torch.zeros_like(total)
    sum_gradient = sum_gradient if ctx.fused else None
    dx, dscale, dbias = _layer_norm_backward(gradient, sum_gradient, total, mean, rstd, scale, bias)
    return dx, dx if ctx.fused else None, dscale, dbias, None


_layer_norm_backward = operators.define(
    "layer_norm_backward(Tensor gradient, Tensor? sum_gradient, Tensor total, Tensor mean, Tensor rstd,"
    " Tensor scale, Tensor bias) -> (Tensor, Tensor, Tensor)",
    Operation("layer_norm_backward", torch=reference.backward, native=cpu.backward, triton=_triton_backward),
    fake=_fake_backward,
)
_layer_norm = operators.define(
    "layer_norm(Tensor x, Tensor? residual, Tensor scale, Tensor bias, float epsilon)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    Operation("layer_norm", torch=reference.forward, native=cpu.forward, triton=_triton_forward),
    fake=_fake_forward,
    backward=_differentiate,
    setup_context=_remember,
)
