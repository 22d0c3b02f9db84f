"""Layer norm in Triton over `[R, D]`, forward and backward.

Grid: on axis 0, runs of tiles of ROWS rows. A program holds whole rows in registers, BLOCK >= D columns at
a time, so D is at most 8,192. Forward it owns one tile: a row is read once (twice with a residual) and
written once (twice). Backward it owns a run of tiles, reads the gradient and the row, writes dx, and keeps
its own sums of the scale's and the bias's gradients, which torch adds in an order that depends only on the
shape. Bound by memory. Any floating dtype up to float32 in and out; statistics, parameters and sums in
float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 8192
PARTS = 256  # at most so many programs in backward
TILE = 2048  # elements of a tile of several rows


@triton.jit
def _layer_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    mean_ptr,
    rstd_ptr,
    stride_xr: tl.int64,
    stride_rr: tl.int64,
    stride_yr: tl.int64,
    rows,
    columns,
    epsilon,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    x = tl.load(x_ptr + r[:, None] * stride_xr + c[None, :], mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + r[:, None] * stride_rr + c[None, :], mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + r[:, None] * stride_yr + c[None, :], x, mask=mask)
    wide = x.to(tl.float32)
    mean = tl.sum(wide, axis=1) / columns
    centred = tl.where(mask, wide - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / columns + epsilon)
    scale = tl.load(scale_ptr + c, mask=c < columns, other=0.0)
    bias = tl.load(bias_ptr + c, mask=c < columns, other=0.0)
    y = centred * rstd[:, None] * scale[None, :] + bias[None, :]
    tl.store(y_ptr + r[:, None] * stride_yr + c[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + r, mean, mask=r < rows)
    tl.store(rstd_ptr + r, rstd, mask=r < rows)


@triton.jit
def _layer_norm_backward_kernel(
    g_ptr,
    extra_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    scale_ptr,
    dx_ptr,
    partial_ptr,
    stride_gr: tl.int64,
    stride_er: tl.int64,
    stride_xr: tl.int64,
    stride_dr: tl.int64,
    rows,
    columns,
    tiles,
    HAS_EXTRA: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr + c, mask=c < columns, other=0.0)
    dscale = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    for tile in range(tiles):
        r = (part * tiles + tile) * ROWS + tl.arange(0, ROWS)
        mask = (r < rows)[:, None] & (c < columns)[None, :]
        g = tl.load(g_ptr + r[:, None] * stride_gr + c[None, :], mask=mask, other=0.0)
        x = tl.load(x_ptr + r[:, None] * stride_xr + c[None, :], mask=mask, other=0.0)
        mean = tl.load(mean_ptr + r, mask=r < rows, other=0.0)
        rstd = tl.load(rstd_ptr + r, mask=r < rows, other=0.0)
        g = g.to(tl.float32)
        normed = tl.where(mask, (x.to(tl.float32) - mean[:, None]) * rstd[:, None], 0.0)
        scaled = g * scale[None, :]
        m1 = tl.sum(scaled, axis=1) / columns
        m2 = tl.sum(scaled * normed, axis=1) / columns
        dx = (scaled - m1[:, None] - normed * m2[:, None]) * rstd[:, None]
        if HAS_EXTRA:
            extra = tl.load(extra_ptr + r[:, None] * stride_er + c[None, :], mask=mask, other=0.0)
            dx += extra.to(tl.float32)
        tl.store(dx_ptr + r[:, None] * stride_dr + c[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dscale += tl.sum(g * normed, axis=0)
        dbias += tl.sum(g, axis=0)
    tl.store(partial_ptr + part * 2 * columns + c, dscale, mask=c < columns)
    tl.store(partial_ptr + (part * 2 + 1) * columns + c, dbias, mask=c < columns)


def forward(x: Tensor, residual: Tensor | None, scale: Tensor, bias: Tensor, epsilon: float) -> Any:
    """As `kernels.layer_norm.reference.forward`; NotImplemented for float64 and rows wider than WIDEST."""
    if x.dtype == torch.float64 or x.shape[-1] > WIDEST:
        return NotImplemented
    normed, total = x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape)
    count, width = x.shape[:-1].numel(), x.shape[-1]
    mean, rstd = (x.new_empty(count, dtype=torch.float32) for _ in range(2))
    if count:
        x, y = _matrix(x), normed.view(-1, width)
        added = x if residual is None else _matrix(residual)
        rows, block, warps = _tile(width)
        _layer_norm_forward_kernel[(triton.cdiv(count, rows),)](
            x, added, scale.float().contiguous(), bias.float().contiguous(), y, total, mean, rstd,
            x.stride(0), added.stride(0), y.stride(0), count, width, epsilon,
            HAS_RESIDUAL=residual is not None, ROWS=rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return normed, total, mean, rstd


def backward(
    gradient: Tensor,
    sum_gradient: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor,
    bias: Tensor,
) -> Any:
    """As `kernels.layer_norm.reference.backward`; NotImplemented where `forward` gives it."""
    if total.dtype == torch.float64 or total.shape[-1] > WIDEST:
        return NotImplemented
    out = total.new_empty(total.shape)
    count, width = mean.numel(), total.shape[-1]
    rows, block, warps = _tile(width)
    tiles = triton.cdiv(triton.cdiv(count, rows), PARTS)
    parts = triton.cdiv(count, rows * tiles) if count else 0
    partial = total.new_empty((parts, 2, width), dtype=torch.float32)
    if count:
        g, x, dx = _matrix(gradient), _matrix(total), out.view(-1, width)
        extra = g if sum_gradient is None else _matrix(sum_gradient)
        _layer_norm_backward_kernel[(parts,)](
            g, extra, x, mean, rstd, scale.float().contiguous(), dx, partial,
            g.stride(0), extra.stride(0), x.stride(0), dx.stride(0), count, width, tiles,
            HAS_EXTRA=sum_gradient is not None, ROWS=rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    dscale, dbias = partial.sum(0)
    return out, dscale.to(scale.dtype, copy=True), dbias.to(bias.dtype, copy=True)


def _matrix(x: Tensor) -> Tensor:
    """All axes but the last as one, and adjacent columns: a view where the strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _tile(width: int) -> tuple[int, int, int]:
    """Rows of a tile, its columns (a power of two) and warps to hold it."""
    block = triton.next_power_of_2(width)
    rows = max(1, min(16, TILE // block))
    return rows, block, max(1, min(16, rows * block // 512))
