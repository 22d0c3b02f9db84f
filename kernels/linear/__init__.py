"""Linear layers and a block's feed-forward, with bias, residual sum and GELU in the products' own passes.

Each is one node of the autograd graph. The feed-forward keeps only what goes into GELU and computes what
comes out of it again.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.dispatch import Operation
from kernels.gelu import gelu
from kernels.linear import cpu, reference
from kernels.operands import Operands, require_operands
from kernels.operators import define, in_shape

__all__ = ["feed_forward", "half_operand", "linear"]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    operands: Operands = "full",
) -> Tensor:
    """residual + x W^T + bias: x `[..., in]`, weight `[out, in]`, bias `[out]`, residual `[..., out]`.

    One floating dtype. What `operands` names happens to the factors of the products, gradients too: "half"
    rounds them to bfloat16 for a device's matrix units, and a CPU with AVX2 and without these brings float32
    to fixed point of 16 bits, which loses less; "int8" rounds them to 8 bits with a scale for each 64 along
    the summed index. Everything else stays in the dtype of x. The bits depend on the number of rows, and on a
    CPU without the compiled code on the number of threads. ValueError for shapes or dtypes that do not fit.
    """
    if not x.ndim:
        raise ValueError("x is a scalar: it must be [..., in]")
    rows = weight.shape[0] if weight.ndim else 0
    shapes = ((rows, x.shape[-1]), (rows,), (*x.shape[:-1], rows))
    require_operands(operands)
    _require("linear", x, shapes, weight=weight, bias=bias, residual=residual)
    if operands == "full" and few(x):
        y = functional.linear(x, weight, bias)
        return y if residual is None else residual + y
    return _linear(x, weight, bias, residual, operands)


def feed_forward(
    x: Tensor,
    expand: Tensor,
    expand_bias: Tensor,
    project: Tensor,
    project_bias: Tensor,
    residual: Tensor,
    *,
    operands: Operands = "full",
) -> Tensor:
    """residual + W2 gelu(W1 x + b1) + b2: x and residual `[..., D]`, expand `[F, D]`, project `[D, F]`.

    dtypes, `operands` and errors as for `linear`; GELU is the exact one.
    """
    if not x.ndim:
        raise ValueError("x is a scalar: it must be [..., D]")
    width, inner = x.shape[-1], expand.shape[0] if expand.ndim else 0
    shapes = ((inner, width), (inner,), (width, inner), (width,), x.shape)
    names = {"expand": expand, "expand_bias": expand_bias, "project": project, "project_bias": project_bias}
    require_operands(operands)
    _require("feed_forward", x, shapes, **names, residual=residual)
    if operands == "full" and few(x):
        h = gelu(functional.linear(x, expand, expand_bias))
        return residual + functional.linear(h, project, project_bias)
    return _feed_forward(x, expand, expand_bias, project, project_bias, residual, operands)[0]


def half_operand(x: Tensor) -> Tensor:
    """x in bfloat16 where a device has matrix units, else as it is."""
    return x.bfloat16() if reference.has_matrix_units(x.device) else x


def few(x: Tensor) -> bool:
    """Whether x has so few rows that torch's own operations cost less than a node of ours.

    Not under autocast, which would change the dtype of their results.
    """
    fewer = x.numel() < cpu.FEWEST_ROWS * x.shape[-1] and x.device.type == "cpu"
    return fewer and not torch.is_autocast_enabled("cpu")


def _require(
    operation: str, x: Tensor, shapes: tuple[tuple[int, ...], ...], **tensors: Tensor | None
) -> None:
    """ValueError unless x is floating and each tensor given has its shape and x's dtype and device."""
    if not x.dtype.is_floating_point:
        raise ValueError(f"{operation}: x is {x.dtype}; convert it to a floating-point dtype first")
    for (name, tensor), shape in zip(tensors.items(), shapes, strict=True):
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device:
            raise ValueError(
                f"{operation}: {name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; "
                f"make it {x.dtype} {list(shape)} on {x.device}"
            )


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


# The operators take x, residual and upstream gradient with all their axes: through a view outside of them
# autograd would store the upstream gradient itself, which others may have too, as the residual's.


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, operands: Operands
) -> Tensor:
    residual = None if residual is None else _matrix(residual)
    y: Tensor = dense_forward(_matrix(x), weight, bias, residual, operands)
    return in_shape(y, (*x.shape[:-1], weight.shape[0]))


def _backward(
    gradient: Tensor, x: Tensor, weight: Tensor, needed: list[bool], operands: Operands
) -> list[Tensor]:
    found = dense_backward(_matrix(gradient), _matrix(x), weight, needed, operands)
    return _shaped(found, gradient, needed)


def _shaped(found: list[Tensor], gradient: Tensor, needed: list[bool]) -> list[Tensor]:
    """The gradients, that of x with all axes."""
    return [found[0].view(*gradient.shape[:-1], found[0].shape[1]), *found[1:]] if needed[0] else found


def _fake_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, needed: list[bool], operands: Operands
) -> list[Tensor]:
    shapes = ((*gradient.shape[:-1], weight.shape[1]), weight.shape, weight.shape[:1])
    return [gradient.new_empty(shape) for shape, wanted in zip(shapes, needed, strict=True) if wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, _, ctx.operands = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:3])
    given = gradient if x is None else x
    found = iter(_linear_backward(gradient, given, weight, needed, ctx.operands) if any(needed) else ())
    residual = gradient if ctx.needs_input_grad[3] else None
    return *(next(found) if wanted else None for wanted in needed), residual, None


def _layers(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *weights, residual, operands = rest
    y, z = layers_forward(_matrix(x), *weights, _matrix(residual), operands)
    return in_shape(y, x.shape), z


def _layers_backward(gradient: Tensor, x: Tensor, *rest: Any) -> list[Tensor]:
    *_, needed, _ = rest
    return _shaped(layers_backward(_matrix(gradient), _matrix(x), *rest), gradient, needed)


def _fake_feed_forward(x: Tensor, expand: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(math.prod(x.shape[:-1]), expand.shape[0])


def _fake_feed_forward_backward(
    gradient: Tensor,
    x: Tensor,
    z: Tensor,
    expand: Tensor,
    project: Tensor,
    needed: list[bool],
    operands: Operands,
) -> list[Tensor]:
    shapes = (x.shape, expand.shape, expand.shape[:1], project.shape, project.shape[:1])
    return [gradient.new_empty(shape) for shape, wanted in zip(shapes, needed, strict=True) if wanted]


def _save_feed_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, expand, _, project, _, _, ctx.operands = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], expand, project)


def _differentiate_feed_forward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    needed = list(ctx.needs_input_grad[:5])
    saved = ctx.saved_tensors
    found = iter(_feed_forward_backward(gradient, *saved, needed, ctx.operands) if any(needed) else ())
    residual = gradient if ctx.needs_input_grad[5] else None
    return *(next(found) if wanted else None for wanted in needed), residual, None


def _flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x[:-1]) * math.prod(weight)


def _backward_flops(gradient: Any, x: Any, weight: Any, needed: list[bool], *_: Any, **__: Any) -> int:
    return 2 * math.prod(gradient[:-1]) * math.prod(weight) * sum(needed[:2])


def _feed_forward_flops(x: Any, expand: Any, *_: Any, **__: Any) -> int:
    return 4 * math.prod(x[:-1]) * math.prod(expand)


def _feed_forward_backward_flops(
    gradient: Any, x: Any, z: Any, expand: Any, project: Any, needed: list[bool], *_: Any, **__: Any
) -> int:
    return 2 * math.prod(z) * gradient[-1] * (1 + needed[0] + needed[1] + needed[3])


dense_forward = Operation("linear", torch=reference.forward, native=cpu.forward)
dense_backward = Operation("linear_backward", torch=reference.backward, native=cpu.backward)
layers_forward = Operation("feed_forward", torch=reference.feed_forward, native=cpu.feed_forward)
layers_backward = Operation(
    "feed_forward_backward", torch=reference.feed_forward_backward, native=cpu.feed_forward_backward
)

_linear_backward = define(
    "linear_backward(Tensor gradient, Tensor x, Tensor weight, bool[] needed, str operands) -> Tensor[]",
    _backward,
    fake=_fake_backward,
    flops=_backward_flops,
)
_linear = define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str operands) -> Tensor",
    _forward,
    fake=lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0]),
    backward=_differentiate,
    setup_context=_save,
    flops=_flops,
)
_feed_forward_backward = define(
    "feed_forward_backward(Tensor gradient, Tensor x, Tensor z, Tensor expand, Tensor project, bool[] needed,"
    " str operands) -> Tensor[]",
    _layers_backward,
    fake=_fake_feed_forward_backward,
    flops=_feed_forward_backward_flops,
)
_feed_forward = define(
    "feed_forward(Tensor x, Tensor expand, Tensor expand_bias, Tensor project, Tensor project_bias,"
    " Tensor residual, str operands) -> (Tensor, Tensor)",
    _layers,
    fake=_fake_feed_forward,
    backward=_differentiate_feed_forward,
    setup_context=_save_feed_forward,
    flops=_feed_forward_flops,
)
