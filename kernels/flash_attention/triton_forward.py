"""Causal attention, forward (Dao et al. 2022).

Grid: axis 0 only, B H ceil(Tq / BLOCK_Q) programs, those with the most keys first. A program owns BLOCK_Q
rows of one head of the output and of its log-sum-exp. It reads its queries once and the keys and values
that they see once: about Tk (4 BLOCK_D) bytes in bf16 and 2 Tk BLOCK_Q BLOCK_D multiply-adds at the most,
half of both on average. Inputs float32 or bfloat16; products of bfloat16 take the probabilities in
bfloat16; sums, maxima and the log-sum-exp are float32. Rows that see nothing give 0 and -inf.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.flash_attention.reference import empty_heads

WIDEST = 128


def forward(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None) -> Any:
    """Attention and log-sum-exp; NotImplemented for float64 and heads wider than 128."""
    batch, heads, queries, width = q.shape
    if q.dtype == torch.float64 or width > WIDEST:
        return NotImplemented
    out, lse = empty_heads(q, q.shape), q.new_empty(batch, heads, queries, dtype=torch.float32)
    block_q, block_k, warps, stages = _configuration(q.dtype, block_width(width))
    programs = batch * heads * triton.cdiv(queries, block_q)
    if not programs:
        return out, lse
    _flash_forward_kernel[(programs,)](
        q,
        k,
        v,
        out,
        lse,
        document_starts,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *out.stride(),
        0 if document_starts is None else document_starts.stride(0),
        0 if document_starts is None else document_starts.stride(1),
        heads,
        queries,
        k.shape[2],
        width**-0.5,
        HAS_STARTS=document_starts is not None,
        WIDTH=width,
        BLOCK_D=block_width(width),
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
    )
    return out, lse


def block_width(width: int) -> int:
    """The head width as kernels see it: a power of two that a matrix unit takes."""
    return max(16, triton.next_power_of_2(width))


def _configuration(dtype: torch.dtype, width: int) -> tuple[int, int, int, int]:
    """Queries and keys in a block, warps, stages; as large as registers allow (no spills)."""
    if dtype == torch.float32:  # no matrix unit: the products live in registers
        return (32, 32, 4 if width <= 64 else 8, 2)
    return (128, 64, 8, 3) if width <= 64 else (64, 32, 8, 3)


@triton.jit
def _flash_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    starts_ptr,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qt: tl.int64,
    stride_qd: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_kt: tl.int64,
    stride_kd: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vt: tl.int64,
    stride_vd: tl.int64,
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_ot: tl.int64,
    stride_od: tl.int64,
    stride_sb: tl.int64,
    stride_st: tl.int64,
    heads,
    queries,
    keys,
    scale: tl.float32,
    HAS_STARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    blocks = tl.cdiv(queries, BLOCK_Q)
    first = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head // heads, head % heads
    row = first + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    row_valid, d_valid = row < queries, d < WIDTH
    row_64 = row.to(tl.int64)

    q_at = q_ptr + b * stride_qb + h * stride_qh + row_64[:, None] * stride_qt + d[None, :] * stride_qd
    q = tl.load(q_at, mask=row_valid[:, None] & d_valid[None, :], other=0.0)
    last = tl.where(row_valid, row + (keys - queries), -1)  # the last key that a row sees
    end = tl.minimum(keys, first + BLOCK_Q + keys - queries)
    begin = 0
    start = tl.zeros([BLOCK_Q], tl.int32)
    if HAS_STARTS:
        starts_at = starts_ptr + b * stride_sb + row_64 * stride_st
        start = tl.load(starts_at, mask=row_valid, other=2147483647).to(tl.int32)
        begin = tl.maximum(tl.min(start, 0), 0) // BLOCK_K * BLOCK_K

    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    out = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for key in range(begin, end, BLOCK_K):
        column = key + tl.arange(0, BLOCK_K)
        column_valid = column < keys
        column_64 = column.to(tl.int64)
        k_at = k_ptr + b * stride_kb + h * stride_kh + d[:, None] * stride_kd + column_64[None, :] * stride_kt
        k = tl.load(k_at, mask=d_valid[:, None] & column_valid[None, :], other=0.0)
        v_at = v_ptr + b * stride_vb + h * stride_vh + column_64[:, None] * stride_vt + d[None, :] * stride_vd
        v = tl.load(v_at, mask=column_valid[:, None] & d_valid[None, :], other=0.0)
        seen = column[None, :] <= last[:, None]
        if HAS_STARTS:
            seen = seen & (column[None, :] >= start[:, None])
        scores = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        subtracted = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        shrink = tl.exp2((highest - subtracted) * LOG2_E)
        p = tl.exp2((scores - subtracted[:, None]) * LOG2_E)
        total = total * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        highest = higher

    none = total == 0.0
    out = out / tl.where(none, 1.0, total)[:, None]
    out_at = out_ptr + b * stride_ob + h * stride_oh + row_64[:, None] * stride_ot + d[None, :] * stride_od
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=row_valid[:, None] & d_valid[None, :])
    lse = tl.where(none, float("-inf"), highest + tl.log(tl.where(none, 1.0, total)))
    tl.store(lse_ptr + head * queries + row_64, lse, mask=row_valid)
