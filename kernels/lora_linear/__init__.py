"""A linear layer with a low-rank adapter (LoRA, Hu et al. 2021) over a dense or NF4-packed weight.

One node of the autograd graph that saves x and x A^T. It composes matrix routines and `kernels.nf4`, and so
runs on every device; on a CPU the adapter's update is added in the base product's own pass.
"""

import math
from functools import partial
from typing import Any

from torch import Tensor

from kernels.dispatch import Operation
from kernels.lora_linear import cpu, path, reference
from kernels.nf4 import FLOATING, PackedNf4
from kernels.nf4.packed import SCHEMA, Weight
from kernels.operands import Operands, require_operands
from kernels.operators import define, in_shape

__all__ = ["lora_linear"]


def lora_linear(
    x: Tensor,
    weight: Tensor | PackedNf4,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    *,
    residual: Tensor | None = None,
    operands: Operands = "full",
) -> Tensor:
    """residual + x W^T + bias + scale (x A^T) B^T, differentiable in every tensor but a packed weight.

    x `[..., in]`, weight `[out, in]`, bias `[out]`, residual `[..., out]`, lora_a `[rank, in]` and lora_b
    `[out, rank]` have one dtype (float32, bf16 or float64) and device; a packed weight has no dtype.
    operands: of the products with the weight, as in `linear` or, for a packed one, `nf4_linear`.
    """
    require_operands(operands)
    _require(x, weight, bias, residual, lora_a, lora_b)
    if isinstance(weight, PackedNf4):
        return _packed_operator(x, *weight.fields(), bias, residual, lora_a, lora_b, scale, operands)[0]
    return _dense_operator(x, weight, bias, residual, lora_a, lora_b, scale, operands)[0]


def _require(
    x: Tensor,
    weight: Tensor | PackedNf4,
    bias: Tensor | None,
    residual: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
) -> None:
    if len(weight.shape) != 2 or not x.ndim or x.dtype not in FLOATING:
        raise ValueError(
            f"x {list(x.shape)} of {x.dtype} and weight {list(weight.shape)}: x must be float32, bfloat16 or "
            "float64 [..., in] and the weight [out, in]"
        )
    rows, columns = weight.shape
    rank = lora_a.shape[0] if lora_a.ndim else 0
    dense = {} if isinstance(weight, PackedNf4) else {"weight": (weight, (rows, columns))}
    biased = {} if bias is None else {"bias": (bias, (rows,))}
    added = {} if residual is None else {"residual": (residual, (*x.shape[:-1], rows))}
    expected = (
        dense | biased | added | {"lora_a": (lora_a, (rank, columns)), "lora_b": (lora_b, (rows, rank))}
    )
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device:
            raise ValueError(
                f"{name} must be {x.dtype} {list(shape)} on {x.device}, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
    if x.shape[-1] != columns:
        raise ValueError(f"x {list(x.shape)} does not end in the {columns} columns of the weight")
    if isinstance(weight, PackedNf4) and weight.codes.device != x.device:
        raise ValueError(f"x is on {x.device} and the weight on {weight.codes.device}: move one of them")


_product = Operation("lora_linear", torch=reference.add_to_product, native=cpu.forward)
_gradient = Operation("lora_linear_backward", torch=reference.add_to_gradient, native=cpu.backward)
_packed_product = Operation(
    "lora_linear_nf4", torch=reference.add_to_packed_product, native=cpu.packed_forward
)
_packed_gradient = Operation(
    "lora_linear_nf4_backward", torch=reference.add_to_packed_gradient, native=cpu.packed_backward
)


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _rows_of(residual: Tensor | None) -> Tensor | None:
    return None if residual is None else _matrix(residual)


def _dense(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    operands: Operands,
) -> tuple[Tensor, Tensor]:
    rows = _matrix(x)
    base = partial(_product, rows, weight, bias, _rows_of(residual), operands)
    return _shaped(x, *path.forward(rows, lora_a, lora_b, scale, base))


def _packed(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    w, (bias, residual, lora_a, lora_b, scale, operands) = Weight(*rest[:8]), rest[8:]
    rows = _matrix(x)
    base = partial(_packed_product, rows, w, bias, _rows_of(residual), operands)
    return _shaped(x, *path.forward(rows, lora_a, lora_b, scale, base))


def _shaped(x: Tensor, y: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return in_shape(y, (*x.shape[:-1], y.shape[1])), hidden


def _dense_backward(
    upstream: Tensor,
    x: Tensor,
    hidden: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    needed: list[bool],
    operands: Operands,
) -> list[Tensor]:
    rows = _matrix(upstream)
    base = partial(_gradient, rows, weight, operands)
    found = path.backward(rows, _matrix(x), hidden, lora_a, lora_b, scale, base, needed)
    return _shaped_gradients(x, found, needed)


def _packed_backward(upstream: Tensor, x: Tensor, hidden: Tensor, *rest: Any) -> list[Tensor]:
    w, (lora_a, lora_b, scale, needed, operands) = Weight(*rest[:8]), rest[8:]
    rows = _matrix(upstream)
    base = partial(_packed_gradient, rows, w, operands)
    found = path.backward(rows, _matrix(x), hidden, lora_a, lora_b, scale, base, needed)
    return _shaped_gradients(x, found, needed)


def _shaped_gradients(x: Tensor, gradients: list[Tensor], needed: list[bool]) -> list[Tensor]:
    return [gradients[0].view(x.shape), *gradients[1:]] if needed[0] else gradients


def _fake_forward(x: Tensor, rows: Any, lora_a: Tensor) -> tuple[Tensor, Tensor]:
    count = math.prod(x.shape[:-1])
    return x.new_empty(*x.shape[:-1], rows), x.new_empty(count, lora_a.shape[0])


def _fake_backward(shapes: tuple[tuple[Any, ...], ...], like: Tensor, needed: list[bool]) -> list[Tensor]:
    return [like.new_empty(shape) for shape, wanted in zip(shapes, needed, strict=True) if wanted]


def _fake_dense_backward(
    upstream: Tensor,
    x: Tensor,
    hidden: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    needed: list[bool],
    operands: Operands,
) -> list[Tensor]:
    shapes = (x.shape, weight.shape, weight.shape[:1], lora_a.shape, lora_b.shape)
    return _fake_backward(shapes, upstream, needed)


def _fake_packed_backward(upstream: Tensor, x: Tensor, hidden: Tensor, *rest: Any) -> list[Tensor]:
    rows, columns = rest[4:6]
    lora_a, lora_b, _, needed, _ = rest[8:]
    shapes = (x.shape, (rows, columns), (rows,), lora_a.shape, lora_b.shape)
    return _fake_backward(shapes, upstream, needed)


def _save_dense(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, _, lora_a, lora_b, ctx.scale, ctx.operands = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], weight, lora_a, lora_b)


def _dense_gradients(ctx: Any, upstream: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    asked = ctx.needs_input_grad
    needed = [*asked[:3], *asked[4:6]]
    found = iter(_dense_backward_operator(upstream, *ctx.saved_tensors, ctx.scale, needed, ctx.operands))
    *base, of_a, of_b = (next(found) if wanted else None for wanted in needed)
    return *base, upstream if asked[3] else None, of_a, of_b, None, None


def _save_packed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, codes, scales, group_scales, *ctx.numbers, _, _, lora_a, lora_b, ctx.scale, ctx.operands = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], codes, scales, group_scales, lora_a, lora_b)


def _packed_gradients(ctx: Any, upstream: Tensor, __: Any) -> tuple[Tensor | None, ...]:
    x, hidden, codes, scales, group_scales, lora_a, lora_b = ctx.saved_tensors
    for_bias, for_residual, for_a, for_b = ctx.needs_input_grad[9:13]
    needed = [ctx.needs_input_grad[0], False, for_bias, for_a, for_b]
    weight = (codes, scales, group_scales, *ctx.numbers)
    adapter = (lora_a, lora_b, ctx.scale, needed, ctx.operands)
    found = iter(_packed_backward_operator(upstream, x, hidden, *weight, *adapter))
    of_x, _, of_bias, *others = (next(found) if wanted else None for wanted in needed)
    return of_x, *[None] * 8, of_bias, upstream if for_residual else None, *others, None, None


def _flops(x: Any, rows: int, rank: int) -> int:
    return 2 * (math.prod(x) * rows + math.prod(x) * rank + math.prod(x[:-1]) * rank * rows)


def _backward_flops(x: Any, rows: int, rank: int, needed: list[bool]) -> int:
    for_x, for_weight, _, for_a, for_b = needed
    base, a, b = math.prod(x) * rows, math.prod(x) * rank, math.prod(x[:-1]) * rank * rows
    return 2 * (base * (for_x + for_weight) + a * (for_x + for_a) + b * ((for_x or for_a) + for_b))


_ADAPTER = "Tensor? bias, Tensor? residual, Tensor lora_a, Tensor lora_b, float scale, str operands"
_SAVED = "Tensor lora_a, Tensor lora_b, float scale, bool[] needed, str operands"

_dense_operator = define(
    f"lora_linear(Tensor x, Tensor weight, {_ADAPTER}) -> (Tensor, Tensor)",
    _dense,
    fake=lambda x, weight, bias, residual, lora_a, *_: _fake_forward(x, weight.shape[0], lora_a),
    backward=_dense_gradients,
    setup_context=_save_dense,
    flops=lambda x, weight, bias, residual, lora_a, *_, **__: _flops(x, weight[0], lora_a[0]),
)
_packed_operator = define(
    f"lora_linear_nf4(Tensor x, {SCHEMA}, {_ADAPTER}) -> (Tensor, Tensor)",
    _packed,
    fake=lambda x, *rest: _fake_forward(x, rest[4], rest[10]),
    backward=_packed_gradients,
    setup_context=_save_packed,
    flops=lambda x, *rest, **_: _flops(x, rest[4], rest[10][0]),
)
_dense_backward_operator = define(
    f"lora_linear_backward(Tensor upstream, Tensor x, Tensor hidden, Tensor weight, {_SAVED}) -> Tensor[]",
    _dense_backward,
    fake=_fake_dense_backward,
    flops=lambda upstream, x, hidden, weight, *rest, **_: _backward_flops(x, weight[0], hidden[-1], rest[3]),
)
_packed_backward_operator = define(
    f"lora_linear_nf4_backward(Tensor upstream, Tensor x, Tensor hidden, {SCHEMA}, {_SAVED}) -> Tensor[]",
    _packed_backward,
    fake=_fake_packed_backward,
    flops=lambda upstream, x, hidden, *rest, **_: _backward_flops(x, rest[4], hidden[-1], rest[11]),
)
