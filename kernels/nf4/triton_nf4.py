"""NF4 on GPUs: exact quantisation and decoding, and the product of few rows straight from the codes.

Quantise: a program owns BLOCKS blocks; 4 bytes read, 0.5 written, about 70 operations per element.
Decode: a program owns COLUMNS columns of one row; 0.5 bytes read, 2 or 4 written per element.
Product: a program owns all of x (16 rows at most) and ROWS rows of the weight, COLUMNS columns at a time; 0.5
bytes read per element of the weight, 2 operations per row of x.

All arithmetic is float32 and rounds as the encoding says: true divisions and no fused multiply-adds, except
in the product, which accumulates in float32 and multiplies in the dtype of x.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.nf4 import panels
from kernels.nf4.packed import CODE_VALUES, Weight

FEW_ROWS = 16
_EXACT = {"enable_fp_fusion": False}


@triton.jit
def _nearest(ratio, values_ptr):
    """The code nearest to each element, the lower one of two equally near."""
    code = tl.zeros(ratio.shape, tl.int32)
    least = tl.abs(ratio - tl.load(values_ptr))
    for k in tl.static_range(1, 16):
        distance = tl.abs(ratio - tl.load(values_ptr + k))
        closer = distance < least
        code = tl.where(closer, k, code)
        least = tl.where(closer, distance, least)
    return code


@triton.jit
def _quantize_kernel(
    weight_ptr,
    values_ptr,
    codes_ptr,
    scales_ptr,
    count: tl.int64,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    even = block[:, None] * BLOCK_SIZE + 2 * tl.arange(0, BLOCK_SIZE // 2)[None, :]
    odd = even + 1
    low = tl.load(weight_ptr + even, mask=even < count, other=0.0)
    high = tl.load(weight_ptr + odd, mask=odd < count, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
    tl.store(scales_ptr + block, scale, mask=block * BLOCK_SIZE < count)
    empty = (scale == 0.0)[:, None]
    divisor = tl.where(empty, 1.0, scale[:, None])
    low_code = tl.where(empty, 7, _nearest(tl.div_rn(low, tl.broadcast_to(divisor, low.shape)), values_ptr))
    high_code = tl.where(
        empty, 7, _nearest(tl.div_rn(high, tl.broadcast_to(divisor, high.shape)), values_ptr)
    )
    high_code = tl.where(odd < count, high_code, 0)
    tl.store(codes_ptr + even // 2, (low_code | (high_code << 4)).to(tl.uint8), mask=even < count)


@triton.jit
def _weights(
    codes_ptr, scales_ptr, groups_ptr, values_ptr, offset, element, mask,
    BLOCK_SIZE: tl.constexpr, SCALE_BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The float32 weights of flat elements."""
    byte = tl.load(codes_ptr + (element >> 1), mask=mask, other=0).to(tl.int32)
    value = tl.load(values_ptr + ((byte >> ((element & 1).to(tl.int32) * 4)) & 15))
    block = element // BLOCK_SIZE
    if SCALE_BLOCK_SIZE == 0:
        scale = tl.load(scales_ptr + block, mask=mask, other=0.0)
        return tl.where(scale == 0.0, 0.0, value * scale)
    ratio = tl.load(scales_ptr + block, mask=mask, other=128).to(tl.float32) - 128.0
    group = tl.load(groups_ptr + block // SCALE_BLOCK_SIZE, mask=mask, other=0.0)
    scale = offset + group * tl.div_rn(ratio, tl.full(ratio.shape, 127.0, tl.float32))
    scale = tl.minimum(tl.maximum(scale, 0.0), 3.4028234663852886e38)
    return tl.where(scale == 0.0, 0.0, value * scale)  # never -0


@triton.jit
def _decode_kernel(
    codes_ptr, scales_ptr, groups_ptr, values_ptr, out_ptr, offset,
    first_row: tl.int64, first_column: tl.int64, row_length: tl.int64, out_columns, stride_out: tl.int64,
    BLOCK_SIZE: tl.constexpr, SCALE_BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(out_columns, COLUMNS)
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = (tl.program_id(0) % parts) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < out_columns
    element = (first_row + row) * row_length + first_column + column
    weight = _weights(
        codes_ptr, scales_ptr, groups_ptr, values_ptr, offset, element, mask, BLOCK_SIZE, SCALE_BLOCK_SIZE
    )
    tl.store(out_ptr + row * stride_out + column, weight.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _product_kernel(
    x_ptr, codes_ptr, scales_ptr, groups_ptr, values_ptr, bias_ptr, y_ptr, offset, count, rows, columns,
    stride_xn: tl.int64, stride_xk: tl.int64, stride_yn: tl.int64,
    BLOCK_SIZE: tl.constexpr, SCALE_BLOCK_SIZE: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, 16)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide_row = row.to(tl.int64)[:, None]
    sums = tl.zeros((16, ROWS), tl.float32)
    for first in range(0, columns, COLUMNS):
        k = first + tl.arange(0, COLUMNS)
        x_mask = (n < count)[:, None] & (k < columns)[None, :]
        x = tl.load(x_ptr + n[:, None] * stride_xn + k[None, :] * stride_xk, mask=x_mask, other=0.0)
        mask = (row < rows)[:, None] & (k < columns)[None, :]
        element = wide_row * columns + k[None, :]
        weight = _weights(
            codes_ptr, scales_ptr, groups_ptr, values_ptr, offset, element, mask, BLOCK_SIZE, SCALE_BLOCK_SIZE
        )
        weight = tl.where(mask, weight, 0.0).to(x.dtype)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    y_mask = (n < count)[:, None] & (row < rows)[None, :]
    tl.store(y_ptr + n[:, None] * stride_yn + row[None, :], sums.to(y_ptr.dtype.element_ty), mask=y_mask)


def quantize_blocks(weight: Tensor, block_size: int) -> Any:
    """As `reference.quantize_blocks`."""
    weight = weight.contiguous()
    count = weight.numel()
    blocks = triton.cdiv(count, block_size)
    codes = weight.new_empty(triton.cdiv(count, 2), dtype=torch.uint8)
    scales = weight.new_empty(blocks)
    per_program = max(1, 2048 // block_size)
    _quantize_kernel[(triton.cdiv(blocks, per_program),)](
        weight, _values(weight.device), codes, scales, count, block_size, per_program, **_EXACT
    )
    return codes, scales


def dequantize(codes: Tensor, w: Weight) -> Tensor:
    """As `reference.dequantize`."""
    out = codes.new_empty(w.rows, w.columns, dtype=torch.float32)
    decode(w, 0, 0, out)
    return out


def decode(w: Weight, first_row: int, first_column: int, out: Tensor) -> None:
    """As `reference.decode`."""
    rows, columns = out.shape
    width = 1024 if columns > 256 else 256
    _decode_kernel[(rows * triton.cdiv(columns, width),)](
        *_pointers(w), out, w.offset, first_row, first_column, w.columns, columns, out.stride(0),
        w.block_size, w.scale_block_size, width, **_EXACT
    )  # fmt: skip


def forward(x: Tensor, w: Weight, bias: Tensor | None, _: str) -> Any:
    """As `panels.forward`, for float32 and bf16."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    if len(x) > FEW_ROWS or not len(x):
        return panels.forward(x, w, bias, decode)
    y = x.new_empty(len(x), w.rows)
    columns = 32 if x.dtype == torch.float32 else 64  # more would spill
    bias = None if bias is None else bias.contiguous()
    _product_kernel[(triton.cdiv(w.rows, 16),)](
        x, *_pointers(w), x if bias is None else bias, y, w.offset, len(x), w.rows, w.columns,
        *x.stride(), y.stride(0), w.block_size, w.scale_block_size, bias is not None, 16, columns,
    )  # fmt: skip
    return y


def backward(upstream: Tensor, w: Weight, _: str) -> Any:
    """As `panels.backward`, for float32 and bf16."""
    narrow = upstream.dtype in (torch.float32, torch.bfloat16)
    return panels.backward(upstream, w, decode) if narrow else NotImplemented


def _pointers(w: Weight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    groups = w.scales if w.group_scales is None else w.group_scales
    return w.codes, w.scales, groups, _values(w.codes.device)


@functools.cache
def _values(device: torch.device) -> Tensor:
    return torch.tensor(CODE_VALUES, dtype=torch.float32, device=device)
