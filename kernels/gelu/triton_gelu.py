"""GELU in Triton, forward and backward over `[R, F]` matrices.

Grid: on axis 0, (parts of the rows) x (blocks of columns). A program owns one block of columns over a run
of rows, which it walks in tiles of ROWS x COLUMNS. An element costs one load, one erf and one store
forward, and two loads, erf, exp and one store backward: bound by memory. Any floating dtype up to float32
in and out, float32 inside; the bias is float32. The bias gradient leaves as one float32 row per part and is
summed by torch, in an order that depends only on the shape.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
COLUMNS = 128
PARTS = 256  # at most so many runs of rows


@triton.jit
def _gelu_forward_kernel(
    x_ptr,
    bias_ptr,
    y_ptr,
    stride_xr: tl.int64,
    stride_xc: tl.int64,
    stride_yr: tl.int64,
    rows,
    columns,
    tiles,  # of rows, per program
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    blocks = tl.cdiv(columns, COLUMNS)
    part = (tl.program_id(0) // blocks).to(tl.int64)
    c = (tl.program_id(0) % blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.zeros([COLUMNS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + c, mask=c < columns, other=0.0)
    for tile in range(tiles):
        r = (part * tiles + tile) * ROWS + tl.arange(0, ROWS)
        mask = (r < rows)[:, None] & (c < columns)[None, :]
        x = tl.load(x_ptr + r[:, None] * stride_xr + c[None, :] * stride_xc, mask=mask, other=0.0)
        z = x.to(tl.float32) + bias[None, :]
        y = 0.5 * z * (1.0 + tl.math.erf(z * 0.7071067811865476))
        tl.store(y_ptr + r[:, None] * stride_yr + c[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_backward_kernel(
    g_ptr,
    x_ptr,
    bias_ptr,
    dx_ptr,
    partial_ptr,
    stride_gr: tl.int64,
    stride_gc: tl.int64,
    stride_xr: tl.int64,
    stride_xc: tl.int64,
    stride_dr: tl.int64,
    rows,
    columns,
    tiles,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    blocks = tl.cdiv(columns, COLUMNS)
    part = (tl.program_id(0) // blocks).to(tl.int64)
    c = (tl.program_id(0) % blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.zeros([COLUMNS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + c, mask=c < columns, other=0.0)
    sums = tl.zeros([COLUMNS], tl.float32)
    for tile in range(tiles):
        r = (part * tiles + tile) * ROWS + tl.arange(0, ROWS)
        mask = (r < rows)[:, None] & (c < columns)[None, :]
        x = tl.load(x_ptr + r[:, None] * stride_xr + c[None, :] * stride_xc, mask=mask, other=0.0)
        g = tl.load(g_ptr + r[:, None] * stride_gr + c[None, :] * stride_gc, mask=mask, other=0.0)
        z = x.to(tl.float32) + bias[None, :]
        probability = 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476))
        density = tl.exp(-0.5 * z * z) * 0.3989422804014327
        dx = g.to(tl.float32) * (probability + z * density)
        tl.store(dx_ptr + r[:, None] * stride_dr + c[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        sums += tl.sum(dx, axis=0)
    if HAS_BIAS:
        tl.store(partial_ptr + part * columns + c, sums, mask=c < columns)


def forward(x: Tensor, bias: Tensor | None) -> Tensor:
    """As `kernels.gelu.reference.forward`; NotImplemented for float64."""
    if x.dtype == torch.float64:
        return NotImplemented
    out = x.new_empty(x.shape)
    if x.numel():
        y, x = _matrix(out), _matrix(x)
        _, tiles, grid = _split(x)
        shift = None if bias is None else bias.float().contiguous()
        _gelu_forward_kernel[grid](
            x, shift, y, *x.stride(), y.stride(0), *x.shape, tiles,
            HAS_BIAS=bias is not None, ROWS=ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip
    return out


def backward(gradient: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `kernels.gelu.reference.backward`; NotImplemented for float64."""
    if x.dtype == torch.float64:
        return NotImplemented
    out = x.new_empty(x.shape)
    partial = x.new_empty((0, x.shape[-1] if x.dim() else 1), dtype=torch.float32)
    if x.numel():
        g, x, dx = _matrix(gradient), _matrix(x), _matrix(out)
        parts, tiles, grid = _split(x)
        partial = x.new_empty((parts if bias is not None else 0, x.shape[1]), dtype=torch.float32)
        shift = None if bias is None else bias.float().contiguous()
        _gelu_backward_kernel[grid](
            g, x, shift, dx, partial, *g.stride(), *x.stride(), dx.stride(0), *x.shape, tiles,
            HAS_BIAS=bias is not None, ROWS=ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip
    return out, x.new_empty(0) if bias is None else partial.sum(0).to(bias.dtype)


def _matrix(x: Tensor) -> Tensor:
    """All axes but the last as one: a view where the strides allow it."""
    return x.reshape(-1, x.shape[-1] if x.dim() else 1)


def _split(x: Tensor) -> tuple[int, int, tuple[int]]:
    """Runs of rows, tiles of rows in each, and the grid."""
    tiles = triton.cdiv(triton.cdiv(x.shape[0], ROWS), PARTS)
    parts = triton.cdiv(x.shape[0], ROWS * tiles)
    return parts, tiles, (parts * triton.cdiv(x.shape[1], COLUMNS),)
