"""Cross-entropy of the next token, from logits or from the rows that the head turns into logits."""

from typing import Any, Literal

import torch
from torch import Tensor

from kernels import operators
from kernels.cross_entropy import cpu, reference
from kernels.cross_entropy.chunks import Chunked
from kernels.dispatch import Operation
from kernels.operands import Operands, require_operands

__all__ = ["cross_entropy", "linear_cross_entropy"]


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Mean or sum of -log softmax(logits)[target] over the positions that count, a scalar.

    logits `[..., V]`, targets int64 `[...]`, mask bool `[...]` with the positions that count (all by
    default); targets elsewhere may be anything. The losses of rows are summed in float64 and the result is
    float32 (float64 for float64 logits). Where nothing counts the loss and the gradients are 0. A row with
    NaN or +inf gives NaN. ValueError for shapes or dtypes that do not fit and, on a CPU, for a target
    outside the vocabulary; elsewhere that gives NaN, because to look would stall the device.
    """
    if logits.dim() == 0:
        raise ValueError("cross_entropy: logits are one number; make them [..., V]")
    size = logits.shape[-1]
    targets, mask = _checked("cross_entropy", logits, size, targets, mask, reduction)
    return _cross_entropy(logits.reshape(targets.numel(), size), targets, mask, reduction == "mean")[0]


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    operands: Operands = "full",
) -> Tensor:
    """`cross_entropy(x @ weight.T + bias, ...)` in chunks of rows: all the logits never exist at once.

    x `[..., D]`, weight `[V, D]` of the same dtype, bias `[V]` or None; the rest and the result as for
    `cross_entropy`. operands: of the three products, as in `linear`. The gradients that autograd will ask
    for are computed here, with those of weight and bias summed over the chunks in float32, and backward only
    scales them. ValueError as for `cross_entropy`.
    """
    require_operands(operands)
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        given = f"x {list(x.shape)} {x.dtype} and weight {list(weight.shape)} {weight.dtype}"
        raise ValueError(
            f"linear_cross_entropy: {given} do not fit; make them [..., D] and [V, D] of one dtype"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        size = len(weight)
        raise ValueError(
            f"linear_cross_entropy: bias has shape {list(bias.shape)}; give it [{size}], as weight"
        )
    targets, mask = _checked("linear_cross_entropy", x, len(weight), targets, mask, reduction)
    needed = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias)]
    rows = x.reshape(targets.numel(), x.shape[-1])
    return _linear_cross_entropy(rows, weight, bias, targets, mask, reduction == "mean", operands, *needed)[0]


def _checked(
    name: str, rows: Tensor, vocabulary_size: int, targets: Tensor, mask: Tensor | None, reduction: str
) -> tuple[Tensor, Tensor | None]:
    """The targets and the mask, flat, once all shapes and dtypes are known to fit."""
    if not rows.dtype.is_floating_point:
        raise ValueError(f"{name}: the input is {rows.dtype}; convert it to a floating-point dtype first")
    if vocabulary_size == 0:
        raise ValueError(f"{name}: the vocabulary is empty; it must have at least one entry")
    expected = list(rows.shape[:-1])
    if targets.dtype != torch.int64 or list(targets.shape) != expected:
        given = f"{targets.dtype} {list(targets.shape)}"
        raise ValueError(f"{name}: targets are {given}; make them int64 {expected}")
    if mask is not None and (mask.dtype != torch.bool or list(mask.shape) != expected):
        raise ValueError(f"{name}: mask is {mask.dtype} {list(mask.shape)}; make it bool {expected}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{name}: reduction is {reduction!r}; choose mean or sum")
    return targets.flatten(), None if mask is None else mask.flatten()


def _refuse_outside(targets: Tensor, mask: Tensor | None, vocabulary_size: int) -> None:
    """ValueError for a target outside the vocabulary, where that can be seen without waiting for a device."""
    if targets.device.type != "cpu":
        return
    outside = (targets < 0) | (targets >= vocabulary_size)
    if mask is not None:
        outside &= mask
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"cross_entropy: target {int(targets[row])} of row {row} is outside the vocabulary of"
            f" {vocabulary_size}; correct it, or leave the row out by the mask"
        )


def _triton_forward(*arguments: Any) -> Any:
    from kernels.cross_entropy import triton_cross_entropy

    return triton_cross_entropy.forward(*arguments)


def _triton_backward(*arguments: Any) -> Any:
    from kernels.cross_entropy import triton_cross_entropy

    return triton_cross_entropy.backward(*arguments)


def _triton_linear(*arguments: Any) -> Any:
    from kernels.cross_entropy import triton_cross_entropy

    return triton_cross_entropy.linear_cross_entropy(*arguments)


_forward = Operation("cross_entropy", torch=reference.forward, native=cpu.forward, triton=_triton_forward)
_linear = Operation(
    "linear_cross_entropy",
    torch=Chunked(reference.in_place),
    native=cpu.linear_cross_entropy,
    triton=_triton_linear,
)


def _checked_forward(logits: Tensor, targets: Tensor, mask: Tensor | None, mean: bool) -> Any:
    _refuse_outside(targets, mask, logits.shape[1])
    return _forward(logits, targets, mask, mean)


def _checked_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, mask: Tensor | None, *options: bool
) -> Any:
    _refuse_outside(targets, mask, len(weight))
    return _linear(x, weight, bias, targets, mask, *options)


def _fake_forward(logits: Tensor, targets: Tensor, mask: Tensor | None, mean: bool) -> tuple[Tensor, Tensor]:
    kind = reference.statistics_dtype(logits)
    return logits.new_empty((), dtype=kind), logits.new_empty((len(targets), 2), dtype=kind)


def _fake_backward(
    upstream: Tensor, logits: Tensor, targets: Tensor, mask: Tensor | None, statistics: Tensor, mean: bool
) -> Tensor:
    return logits.new_empty(logits.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, mask, ctx.mean = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, targets, mask, output[1])


def _differentiate(ctx: Any, upstream: Tensor, _: Any) -> tuple[Any, ...]:
    return _cross_entropy_backward(upstream, *ctx.saved_tensors, ctx.mean), None, None, None


def _fake_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    mask: Tensor | None,
    mean: bool,
    operands: Operands,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = x.new_empty((), dtype=reference.statistics_dtype(x))
    dx, dweight = x.new_empty(x.shape if need_x else 0), weight.new_empty(weight.shape if need_weight else 0)
    return loss, dx, dweight, (weight if bias is None else bias).new_empty(len(weight) if need_bias else 0)


def _remember_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needed = inputs[-3:]
    if any(ctx.needs_input_grad[place] and not needed for place, needed in enumerate(ctx.needed)):
        raise RuntimeError(
            "linear_cross_entropy: vmap hides that a gradient of what it maps over is needed; call this for "
            "each element, or cross_entropy on the logits"
        )
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _differentiate_linear(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
    scaled = [
        gradient * upstream.to(gradient.dtype) if needed else None
        for gradient, needed in zip(ctx.saved_tensors, ctx.needed, strict=True)
    ]
    return *scaled, *[None] * 7


def _linear_flops(
    x_shape: list[int], weight_shape: list[int], *rest: Any, out_shape: Any = None, **_: Any
) -> int:
    """The product and one for each gradient, of x and of weight; `rest` ends in need_x, need_weight,
    need_bias."""
    return 2 * x_shape[0] * weight_shape[0] * weight_shape[1] * (1 + rest[-3] + rest[-2])


_cross_entropy_backward = operators.define(
    "cross_entropy_backward(Tensor upstream, Tensor logits, Tensor targets, Tensor? mask, Tensor statistics,"
    " bool mean) -> Tensor",
    Operation(
        "cross_entropy_backward", torch=reference.backward, native=cpu.backward, triton=_triton_backward
    ),
    fake=_fake_backward,
)
_cross_entropy = operators.define(
    "cross_entropy(Tensor logits, Tensor targets, Tensor? mask, bool mean) -> (Tensor, Tensor)",
    _checked_forward,
    fake=_fake_forward,
    backward=_differentiate,
    setup_context=_remember,
)
_linear_cross_entropy = operators.define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor targets, Tensor? mask, bool mean,"
    " str operands, bool need_x, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    _checked_linear,
    fake=_fake_linear,
    backward=_differentiate_linear,
    setup_context=_remember_linear,
    flops=_linear_flops,
)
