"""Linear weights of 4 bits (NF4, Dettmers et al. 2023): packing, unpacking, and products with packed weights.

Packing and unpacking are exact to the contract on every device. Products never hold a float copy of the whole
weight: a few rows of x are multiplied with the codes as they are read, more rows with a panel at a time.
"""

import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import Operation
from kernels.nf4 import cpu, panels, reference
from kernels.nf4.packed import BLOCK_SIZES, CODE_VALUES, SCHEMA, PackedNf4, Weight, require_block_size
from kernels.operands import Operands, require_operands
from kernels.operators import define

__all__ = ["BLOCK_SIZES", "CODE_VALUES", "PackedNf4", "dequantize_nf4", "nf4_linear", "quantize_nf4"]

FLOATING = (torch.float32, torch.bfloat16, torch.float64)


def quantize_nf4(
    weight: Tensor, block_size: int = 64, double_quantization: bool = True, scale_block_size: int = 256
) -> PackedNf4:
    """Pack a finite float32 weight `[rows, columns]`; the sizes are among 32, 64, ... 4096.

    Each block of `block_size` elements has a scale, its largest magnitude, and each element the code whose
    value times the scale is nearest, the lower one of two equally near. With double quantisation the scales
    themselves become 8 bits around their mean, in groups of `scale_block_size`.
    """
    if weight.ndim != 2 or weight.dtype != torch.float32 or not weight.numel():
        raise ValueError(
            f"the weight must be a float32 matrix with elements, got {weight.dtype} {list(weight.shape)}"
        )
    require_block_size("block_size", block_size)
    require_block_size("scale_block_size", scale_block_size)
    weight = weight.detach()
    if not bool(weight.isfinite().all()):
        raise ValueError("the weight has values that are not finite: NF4 cannot hold them")
    codes, scales = _quantize_operator(weight, block_size)
    shape = (weight.shape[0], weight.shape[1])
    if not double_quantization:
        return PackedNf4(codes, scales, shape, block_size)
    scale_codes, group_scales, offset = reference.quantize_scales(scales, scale_block_size)
    return PackedNf4(codes, scale_codes, shape, block_size, group_scales, offset, scale_block_size)


def dequantize_nf4(packed: PackedNf4) -> Tensor:
    """The float32 weight `[rows, columns]`: each block's decoded scale times its codes' values."""
    return _dequantize_operator(*packed.fields())


def nf4_linear(
    x: Tensor, packed: PackedNf4, bias: Tensor | None = None, *, operands: Operands = "full"
) -> Tensor:
    """x W^T + bias: x `[..., columns]`, W the packed weight `[rows, columns]`, bias `[rows]`, in x's dtype.

    x and bias are differentiable; the weight has no gradient. x is float32, bf16 or float64. A CPU may
    multiply float32 as `operands` says, as `linear` does.
    """
    require_operands(operands)
    require_input(x, packed, bias)
    return _linear_operator(x, *packed.fields(), bias, operands)


def require_input(x: Tensor, packed: PackedNf4, bias: Tensor | None) -> None:
    """ValueError unless x and bias fit the weight in shape, dtype and device."""
    rows, columns = packed.shape
    if not x.ndim or x.shape[-1] != columns:
        raise ValueError(f"x {list(x.shape)} does not end in the {columns} columns of the packed weight")
    if x.dtype not in FLOATING:
        raise ValueError(f"x is {x.dtype}: nf4 products take float32, bfloat16 or float64")
    if x.device != packed.codes.device:
        raise ValueError(f"x is on {x.device} and the weight on {packed.codes.device}: move one of them")
    if bias is not None and (bias.shape != (rows,) or bias.dtype != x.dtype or bias.device != x.device):
        raise ValueError(
            f"bias must be {x.dtype} [{rows}] on {x.device}, "
            f"got {bias.dtype} {list(bias.shape)} on {bias.device}"
        )


def _triton(name: str) -> Any:
    def call(*arguments: Any) -> Any:
        module = import_module("kernels.nf4.triton_nf4")  # Triton is optional and slow to import
        return getattr(module, name)(*arguments)

    return call


_quantize = Operation(
    "nf4_quantize",
    torch=reference.quantize_blocks,
    native=cpu.quantize_blocks,
    triton=_triton("quantize_blocks"),
)
_dequantize = Operation(
    "nf4_dequantize",
    torch=reference.dequantize,
    native=cpu.dequantize,
    triton=_triton("dequantize"),
)
linear_forward = Operation(
    "nf4_linear",
    torch=lambda x, w, bias, _: panels.forward(x, w, bias, reference.decode),
    native=cpu.forward,
    triton=_triton("forward"),
)
linear_backward = Operation(
    "nf4_linear_backward",
    torch=lambda upstream, w, _: panels.backward(upstream, w, reference.decode),
    native=cpu.backward,
    triton=_triton("backward"),
)


def _fake_quantize(weight: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    count = weight.numel()
    return weight.new_empty((count + 1) // 2, dtype=torch.uint8), weight.new_empty(-(-count // block_size))


def _fake_dequantize(codes: Tensor, *rest: Any) -> Tensor:
    rows, columns = rest[3:5]
    return codes.new_empty(rows, columns, dtype=torch.float32)


def _linear(x: Tensor, *rest: Any) -> Tensor:
    *fields, bias, operands = rest
    w = Weight(*fields)
    y = linear_forward(_matrix(x), w, bias, operands)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], w.rows)


def _linear_backward(upstream: Tensor, *rest: Any) -> Tensor:
    *fields, operands = rest
    w = Weight(*fields)
    return linear_backward(_matrix(upstream), w, operands).view(*upstream.shape[:-1], w.columns)


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(math.prod(x.shape[:-1]), 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scales, group_scales, *ctx.numbers, _, ctx.operands = inputs
    ctx.save_for_backward(codes, scales, group_scales)


def _gradients(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    needs_x, needs_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[-2]
    x = _backward_operator(upstream, *ctx.saved_tensors, *ctx.numbers, ctx.operands) if needs_x else None
    bias = upstream.sum_to_size(upstream.shape[-1]) if needs_bias else None
    return x, *[None] * 8, bias, None


_quantize_operator = define(
    "nf4_quantize(Tensor weight, int block_size) -> (Tensor, Tensor)", _quantize, fake=_fake_quantize
)
_dequantize_operator = define(
    f"nf4_dequantize({SCHEMA}) -> Tensor",
    lambda codes, *rest: _dequantize(codes, Weight(codes, *rest)),
    fake=_fake_dequantize,
)
_linear_operator = define(
    f"nf4_linear(Tensor x, {SCHEMA}, Tensor? bias, str operands) -> Tensor",
    _linear,
    fake=lambda x, *rest: x.new_empty(*x.shape[:-1], rest[4]),
    backward=_gradients,
    setup_context=_save,
    flops=lambda x, *rest, **_: 2 * math.prod(x) * rest[4],
)
_backward_operator = define(
    f"nf4_linear_backward(Tensor upstream, {SCHEMA}, str operands) -> Tensor",
    _linear_backward,
    fake=lambda upstream, *rest: upstream.new_empty(*upstream.shape[:-1], rest[5]),
    flops=lambda upstream, *rest, **_: 2 * math.prod(upstream) * rest[5],
)
