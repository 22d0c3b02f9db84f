"""Three linear layers of one input, as attention has: one node of the autograd graph for all of them."""

import math
from typing import Any

import torch
from torch import Tensor

from kernels.linear import _matrix, _require, dense_backward, dense_forward, few, linear
from kernels.operands import Operands, require_operands
from kernels.operators import define, in_shape

__all__ = ["qkv_linear"]


def qkv_linear(
    x: Tensor,
    query: Tensor,
    query_bias: Tensor,
    key: Tensor,
    key_bias: Tensor,
    value: Tensor,
    value_bias: Tensor,
    *,
    operands: Operands = "full",
) -> tuple[Tensor, Tensor, Tensor]:
    """x W^T + b for each of three weights `[out, in]` and biases `[out]`, `[..., out]`; x is `[..., in]`.

    dtypes, `operands` and errors as for `linear`. A layer whose result is not used may get zeros
    for gradients, not None.
    """
    weights, biases = (query, key, value), (query_bias, key_bias, value_bias)
    if not x.ndim:
        raise ValueError("x is a scalar: it must be [..., in]")
    shape = (query.shape[0] if query.ndim else 0, x.shape[-1])
    names = {"query": query, "key": key, "value": value}
    bias_names = {f"{name}_bias": bias for name, bias in zip(names, biases, strict=True)}
    require_operands(operands)
    _require("qkv_linear", x, (shape,) * 3 + (shape[:1],) * 3, **names, **bias_names)
    if operands == "full" and few(x):
        q, k, v = (linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        return q, k, v
    found: tuple[Tensor, Tensor, Tensor] = _qkv_linear(
        x, query, query_bias, key, key_bias, value, value_bias, operands
    )
    return found


def _forward(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *layers, operands = rest
    rows, shape = _matrix(x), (*x.shape[:-1], len(layers[0]))
    return tuple(
        in_shape(dense_forward(rows, layers[i], layers[i + 1], None, operands), shape) for i in (0, 2, 4)
    )


def _backward(
    gradients: list[Tensor], x: Tensor, weights: list[Tensor], needed: list[bool], operands: Operands
) -> list[Tensor]:
    """The needed gradients of x and of each weight and bias in turn."""
    shape = (*gradients[0].shape[:-1], weights[0].shape[1])
    rows, of_x, of_layers = _matrix(x), None, []
    for i, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
        asked = [needed[0], *needed[2 * i + 1 : 2 * i + 3]]
        found = dense_backward(_matrix(gradient), rows, weight, asked, operands, of_x)
        of_x = found.pop(0) if needed[0] else None
        of_layers += found
    return of_layers if of_x is None else [of_x.view(shape), *of_layers]


def _fake_forward(x: Tensor, query: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(*x.shape[:-1], query.shape[0]) for _ in range(3))


def _fake_backward(
    gradients: list[Tensor], x: Tensor, weights: list[Tensor], needed: list[bool], operands: Operands
) -> list[Tensor]:
    of_x = (*gradients[0].shape[:-1], weights[0].shape[1])
    shapes = [of_x, *(shape for weight in weights for shape in (weight.shape, weight.shape[:1]))]
    return [x.new_empty(shape) for shape, wanted in zip(shapes, needed, strict=True) if wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, query, _, key, _, value, _, ctx.operands = inputs
    ctx.save_for_backward(x if any(ctx.needs_input_grad[1:6:2]) else None, query, key, value)


def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    some = next(gradient for gradient in gradients if gradient is not None)
    given = [torch.zeros_like(some) if gradient is None else gradient for gradient in gradients]
    needed = list(ctx.needs_input_grad[:7])
    rows = some if x is None else x
    found = iter(_qkv_linear_backward(given, rows, weights, needed, ctx.operands) if any(needed) else ())
    return *(next(found) if wanted else None for wanted in needed), None


def _flops(x: Any, *rest: Any, **_: Any) -> int:
    return 6 * math.prod(x[:-1]) * math.prod(rest[0])


def _backward_flops(gradients: Any, x: Any, weights: Any, needed: list[bool], *_: Any, **__: Any) -> int:
    return 2 * math.prod(x[:-1]) * math.prod(weights[0]) * (3 * needed[0] + sum(needed[1::2]))


_qkv_linear_backward = define(
    "qkv_linear_backward(Tensor[] gradients, Tensor x, Tensor[] weights, bool[] needed, str operands)"
    " -> Tensor[]",
    _backward,
    fake=_fake_backward,
    flops=_backward_flops,
)
_qkv_linear = define(
    "qkv_linear(Tensor x, Tensor query, Tensor query_bias, Tensor key, Tensor key_bias, Tensor value,"
    " Tensor value_bias, str operands) -> (Tensor, Tensor, Tensor)",
    _forward,
    fake=_fake_forward,
    backward=_differentiate,
    setup_context=_save,
    flops=_flops,
)
