"""Attention of new tokens over pages.

Grid: axis 0 only, S H ceil(n / BLOCK_Q) programs. A program owns BLOCK_Q queries of one sequence and head
and walks in blocks of BLOCK_K logical positions from 0 to the last that one of them sees: for each block it
looks up the pages, reads BLOCK_K keys and values (2 d elements each) and does 2 BLOCK_Q BLOCK_K BLOCK_D
multiply-adds. A row's order of sums depends on nothing but its own position. Inputs float32 or bfloat16;
weights of bfloat16 meet the values in bfloat16; maxima and sums are float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.flash_attention.triton_forward import WIDEST, block_width
from kernels.paged_attention.reference import empty_heads

_QUERIES = 16  # the fewest that a matrix unit takes


def attend(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    counts: Tensor | None,
) -> Any:
    """As `paged_attention`; NotImplemented for float64 and heads wider than 128."""
    sequences, heads, queries, width = q.shape
    if q.dtype == torch.float64 or width > WIDEST:
        return NotImplemented
    out = empty_heads(q)
    programs = sequences * heads * triton.cdiv(queries, _QUERIES)
    if not programs:
        return out
    _paged_attention_kernel[(programs,)](
        q,
        key_pages,
        value_pages,
        out,
        page_table,
        lengths.contiguous(),
        None if counts is None else counts.contiguous(),
        *q.stride(),
        *key_pages.stride(),
        *value_pages.stride(),
        *out.stride(),
        *page_table.stride(),
        heads,
        queries,
        key_pages.shape[0],
        page_table.shape[1],
        width**-0.5,
        HAS_COUNTS=counts is not None,
        PAGE_SIZE=key_pages.shape[2],
        WIDTH=width,
        BLOCK_D=block_width(width),
        BLOCK_Q=_QUERIES,
        BLOCK_K=(32 if q.dtype == torch.float32 else 64) // (1 if width <= 64 else 2),
        num_warps=4,
        num_stages=2,
    )
    return out


@triton.jit
def _paged_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    lengths_ptr,
    counts_ptr,
    stride_qs: tl.int64,
    stride_qh: tl.int64,
    stride_qt: tl.int64,
    stride_qd: tl.int64,
    stride_kp: tl.int64,
    stride_kh: tl.int64,
    stride_kt: tl.int64,
    stride_kd: tl.int64,
    stride_vp: tl.int64,
    stride_vh: tl.int64,
    stride_vt: tl.int64,
    stride_vd: tl.int64,
    stride_os: tl.int64,
    stride_oh: tl.int64,
    stride_ot: tl.int64,
    stride_od: tl.int64,
    stride_ts: tl.int64,
    stride_tp: tl.int64,
    heads,
    queries,
    page_count,
    table_width,
    scale: tl.float32,
    HAS_COUNTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    blocks = tl.cdiv(queries, BLOCK_Q)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    s, h = head // heads, head % heads
    first = tl.program_id(0) % blocks * BLOCK_Q
    row = first + tl.arange(0, BLOCK_Q)
    row_64 = row.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    d_valid = d < WIDTH
    length = tl.load(lengths_ptr + s).to(tl.int32)
    count = queries
    if HAS_COUNTS:
        count = tl.load(counts_ptr + s).to(tl.int32)
    last = tl.where(row < count, row + (length - count), -1)  # the last position that a row sees
    end = tl.minimum(length, first + BLOCK_Q + length - count)
    end = tl.where(first < count, tl.minimum(end, table_width * PAGE_SIZE), 0)

    q_at = q_ptr + s * stride_qs + h * stride_qh + row_64[:, None] * stride_qt + d[None, :] * stride_qd
    q = tl.load(q_at, mask=(row < count)[:, None] & d_valid[None, :], other=0.0)
    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    out = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for begin in range(0, end, BLOCK_K):
        position = begin + tl.arange(0, BLOCK_K)
        page_at = table_ptr + s * stride_ts + (position // PAGE_SIZE).to(tl.int64) * stride_tp
        page = tl.load(page_at, mask=position < end, other=-1).to(tl.int64)
        slot = (position % PAGE_SIZE).to(tl.int64)
        valid = (page >= 0) & (page < page_count)
        k_row = page * stride_kp + h * stride_kh + slot * stride_kt
        v_row = page * stride_vp + h * stride_vh + slot * stride_vt
        k_at = k_ptr + k_row[None, :] + d[:, None] * stride_kd
        v_at = v_ptr + v_row[:, None] + d[None, :] * stride_vd
        k = tl.load(k_at, mask=d_valid[:, None] & valid[None, :], other=0.0)
        v = tl.load(v_at, mask=valid[:, None] & d_valid[None, :], other=0.0)
        seen = (position[None, :] <= last[:, None]) & valid[None, :]
        scores = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        subtracted = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2((highest - subtracted) * LOG2_E)
        p = tl.exp2((scores - subtracted[:, None]) * LOG2_E)
        total = total * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        highest = higher

    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out_ptr + s * stride_os + h * stride_oh + row_64[:, None] * stride_ot + d[None, :] * stride_od
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=(row < queries)[:, None] & d_valid[None, :])
