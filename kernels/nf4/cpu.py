"""The compiled NF4 code: exact quantisation, decoding, and the products of few rows."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from kernels.linear import cpu as linear
from kernels.native import Integer, Pointer, function, pointer
from kernels.nf4 import panels
from kernels.nf4.packed import Weight
from kernels.operands import Operands

FEW_ROWS = 12  # decoded in registers, 4 at a time; with more, decoding for the BLAS pays


class _Packed(ctypes.Structure):
    """`Packed` of nf4.cpp."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("scale_codes", ctypes.c_void_p),
        ("group_scales", ctypes.c_void_p),
        ("block_size", ctypes.c_int64),
        ("scale_block_size", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("offset", ctypes.c_float),
    )


_quantize = function("riftco_nf4_quantize", Pointer, Integer, Integer, Pointer, Pointer, Integer)
_decode = function("riftco_nf4_decode", Pointer, *[Integer] * 4, Pointer, Integer)
_product = function("riftco_nf4_product", *[Pointer] * 4, *[Integer] * 3)


def quantize_blocks(weight: Tensor, block_size: int) -> Any:
    """As `reference.quantize_blocks`."""
    if _quantize is None or weight.device.type != "cpu":
        return NotImplemented
    weight = weight.contiguous()
    count = weight.numel()
    codes = weight.new_empty(-(-count // 2), dtype=torch.uint8)
    scales = weight.new_empty(-(-count // block_size))
    _quantize(pointer(weight), count, block_size, pointer(codes), pointer(scales), torch.get_num_threads())
    return codes, scales


def dequantize(codes: Tensor, w: Weight) -> Any:
    """As `reference.dequantize`."""
    if _decode is None or codes.device.type != "cpu":
        return NotImplemented
    out = codes.new_empty(w.rows, w.columns, dtype=torch.float32)
    decode(w, 0, 0, out)
    return out


def decode(w: Weight, first_row: int, first_column: int, out: Tensor) -> None:
    """As `reference.decode`, to float32."""
    assert _decode is not None
    area = (first_row, out.shape[0], first_column, out.shape[1])
    _decode(ctypes.byref(_structure(w)), *area, pointer(out), torch.get_num_threads())


def forward(x: Tensor, w: Weight, bias: Tensor | None, operands: Operands) -> Any:
    """As `panels.forward`, for float32 and bf16."""
    if _product is None or not _covers(x):
        return NotImplemented
    count = x.shape[0]
    if count > FEW_ROWS:
        return panels.forward(x, w, bias, decode, multiplied(x, operands, bias))
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    y = x.new_empty(count, w.rows)
    arrays = (pointer(x), pointer(bias), pointer(y))
    is_bf16 = int(x.dtype == torch.bfloat16)
    _product(ctypes.byref(_structure(w)), *arrays, count, is_bf16, torch.get_num_threads())
    return y


def backward(upstream: Tensor, w: Weight, operands: Operands) -> Any:
    """As `panels.backward`, for float32 and bf16."""
    if _decode is None or not _covers(upstream):
        return NotImplemented
    return panels.backward(upstream, w, decode, multiplied(upstream, operands))


def multiplied(
    x: Tensor,
    operands: Operands,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    low: tuple[Tensor, Tensor] | None = None,
) -> panels.Multiply | None:
    """Panels by our own products where those run; `low` as there, the residual `[rows, out]`."""
    if not linear.covers(x, bias, residual, *(low or ()), operands=operands):
        return None

    def multiply(out: Tensor, x: Tensor, panel: Tensor, part: slice) -> None:
        shift = None if bias is None else bias[part]
        update = low and (low[0], low[1][:, part])
        start = None if residual is None else residual[:, part]
        linear.product(x, panel, shift, start=start, out=out, low=update, operands=operands)

    return multiply


def _covers(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


def _structure(w: Weight) -> _Packed:
    double = w.group_scales is not None
    scales = w.scales.data_ptr()
    return _Packed(
        w.codes.data_ptr(),
        None if double else scales,
        scales if double else None,
        pointer(w.group_scales),
        w.block_size,
        w.scale_block_size,
        w.rows,
        w.columns,
        w.offset,
    )
