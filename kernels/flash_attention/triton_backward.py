"""Causal attention, backward: three kernels, each of which owns what it writes, so that no atomics are
needed.

Grids: axis 0 only. `_flash_delta_kernel`: B H ceil(Tq / BLOCK_Q) programs, each with BLOCK_Q sums of grad *
out. `_flash_keys_kernel`: B H ceil(Tk / BLOCK_K) programs, each with BLOCK_K rows of dk and dv; reads the
queries and gradients that see them, 4 products. `_flash_queries_kernel`: B H ceil(Tq / BLOCK_Q) programs,
each with BLOCK_Q rows of dq; reads the keys and values that they see, 3 products. A product is BLOCK_Q
BLOCK_K BLOCK_D multiply-adds for each pair of blocks, half of the pairs. Probabilities are computed again
as exp(score - lse). Inputs float32 or bfloat16; products of bfloat16 take p and ds in bfloat16; sums are
float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.flash_attention.reference import empty_heads
from kernels.flash_attention.triton_forward import WIDEST, block_width

_DELTA_QUERIES = 32


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, document_starts: Tensor | None
) -> Any:
    """Gradients of q, k and v; NotImplemented for float64 and heads wider than 128."""
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    if q.dtype == torch.float64 or width > WIDEST:
        return NotImplemented
    dq, dk, dv = (empty_heads(x, x.shape) for x in (q, k, v))
    delta, lse = q.new_empty(batch, heads, queries, dtype=torch.float32), lse.contiguous()
    wide = {"WIDTH": width, "BLOCK_D": block_width(width)}
    if batch * heads * queries:
        programs = batch * heads * triton.cdiv(queries, _DELTA_QUERIES)
        _flash_delta_kernel[(programs,)](
            grad, out, delta, *grad.stride(), *out.stride(), heads, queries, BLOCK_Q=_DELTA_QUERIES, **wide
        )
    inputs = (grad, q, k, v, lse, delta, document_starts)
    strides = [stride for x in (grad, q, k, v) for stride in x.stride()]
    strides += [0, 0] if document_starts is None else document_starts.stride()
    sizes = (heads, queries, keys, width**-0.5)
    for_keys, for_queries = _configurations(q.dtype, block_width(width))
    for_all: dict[str, Any] = {"HAS_STARTS": document_starts is not None, **wide}
    if batch * heads * keys:
        programs = batch * heads * triton.cdiv(keys, for_keys["BLOCK_K"])
        _flash_keys_kernel[(programs,)](
            *inputs, dk, dv, *strides, *dk.stride(), *dv.stride(), *sizes, **for_all, **for_keys
        )
    if batch * heads * queries:
        programs = batch * heads * triton.cdiv(queries, for_queries["BLOCK_Q"])
        _flash_queries_kernel[(programs,)](
            *inputs, dq, *strides, *dq.stride(), *sizes, **for_all, **for_queries
        )
    return dq, dk, dv


def _configurations(dtype: torch.dtype, width: int) -> tuple[dict[str, int], dict[str, int]]:
    """Launch configurations of the keys' and the queries' kernel; as large as registers allow (no spills)."""
    if dtype == torch.float32:  # no matrix unit: the products live in registers
        if width <= 64:
            return _configuration(32, 32, 8, 1), _configuration(32, 32, 4, 1)
        return _configuration(16, 32, 8, 1), _configuration(32, 16, 4, 1)
    if width <= 64:
        return _configuration(32, 64, 4, 2), _configuration(64, 32, 4, 2)
    return _configuration(32, 32, 4, 2), _configuration(64, 32, 8, 2)


def _configuration(queries: int, keys: int, warps: int, stages: int) -> dict[str, int]:
    return {"BLOCK_Q": queries, "BLOCK_K": keys, "num_warps": warps, "num_stages": stages}


@triton.jit
def _flash_delta_kernel(
    grad_ptr,
    out_ptr,
    delta_ptr,
    stride_gb: tl.int64,
    stride_gh: tl.int64,
    stride_gt: tl.int64,
    stride_gd: tl.int64,
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_ot: tl.int64,
    stride_od: tl.int64,
    heads,
    queries,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    blocks = tl.cdiv(queries, BLOCK_Q)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head // heads, head % heads
    row = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    valid = (row < queries)[:, None] & (d < WIDTH)[None, :]
    grad_at = grad_ptr + b * stride_gb + h * stride_gh + row[:, None] * stride_gt + d[None, :] * stride_gd
    out_at = out_ptr + b * stride_ob + h * stride_oh + row[:, None] * stride_ot + d[None, :] * stride_od
    grad = tl.load(grad_at, mask=valid, other=0.0).to(tl.float32)
    out = tl.load(out_at, mask=valid, other=0.0).to(tl.float32)
    tl.store(delta_ptr + head * queries + row, tl.sum(grad * out, 1), mask=row < queries)


@triton.jit
def _flash_keys_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    delta_ptr,
    starts_ptr,
    dk_ptr,
    dv_ptr,
    stride_gb: tl.int64,
    stride_gh: tl.int64,
    stride_gt: tl.int64,
    stride_gd: tl.int64,
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
    stride_sb: tl.int64,
    stride_st: tl.int64,
    stride_dkb: tl.int64,
    stride_dkh: tl.int64,
    stride_dkt: tl.int64,
    stride_dkd: tl.int64,
    stride_dvb: tl.int64,
    stride_dvh: tl.int64,
    stride_dvt: tl.int64,
    stride_dvd: tl.int64,
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
    blocks = tl.cdiv(keys, BLOCK_K)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head // heads, head % heads
    key = tl.program_id(0) % blocks * BLOCK_K
    column = key + tl.arange(0, BLOCK_K)
    d = tl.arange(0, BLOCK_D)
    d_valid = d < WIDTH
    column_64 = column.to(tl.int64)
    valid = (column < keys)[:, None] & d_valid[None, :]
    k_at = k_ptr + b * stride_kb + h * stride_kh + column_64[:, None] * stride_kt + d[None, :] * stride_kd
    v_at = v_ptr + b * stride_vb + h * stride_vh + column_64[:, None] * stride_vt + d[None, :] * stride_vd
    k = tl.load(k_at, mask=valid, other=0.0)
    v = tl.load(v_at, mask=valid, other=0.0)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)

    first_seeing = tl.maximum(key - (keys - queries), 0)
    for query in range(first_seeing // BLOCK_Q * BLOCK_Q, queries, BLOCK_Q):
        row = query + tl.arange(0, BLOCK_Q)
        row_valid = row < queries
        row_64 = row.to(tl.int64)
        q_at = q_ptr + b * stride_qb + h * stride_qh + row_64[:, None] * stride_qt + d[None, :] * stride_qd
        g_at = grad_ptr + b * stride_gb + h * stride_gh + row_64[:, None] * stride_gt + d[None, :] * stride_gd
        q = tl.load(q_at, mask=row_valid[:, None] & d_valid[None, :], other=0.0)
        grad = tl.load(g_at, mask=row_valid[:, None] & d_valid[None, :], other=0.0)
        lse = tl.load(lse_ptr + head * queries + row_64, mask=row_valid, other=0.0)
        delta = tl.load(delta_ptr + head * queries + row_64, mask=row_valid, other=0.0)
        seen = (column[:, None] <= row[None, :] + (keys - queries)) & row_valid[None, :]
        if HAS_STARTS:
            start = tl.load(starts_ptr + b * stride_sb + row_64 * stride_st, mask=row_valid, other=0)
            seen = seen & (column[:, None] >= start[None, :])
        exponent = tl.dot(k, tl.trans(q), input_precision="ieee") * scale - lse[None, :]
        p = tl.exp2(tl.where(seen, exponent, float("-inf")) * LOG2_E)
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(grad), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")

    dk_at = (
        dk_ptr + b * stride_dkb + h * stride_dkh + column_64[:, None] * stride_dkt + d[None, :] * stride_dkd
    )
    dv_at = (
        dv_ptr + b * stride_dvb + h * stride_dvh + column_64[:, None] * stride_dvt + d[None, :] * stride_dvd
    )
    tl.store(dk_at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=valid)
    tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _flash_queries_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    delta_ptr,
    starts_ptr,
    dq_ptr,
    stride_gb: tl.int64,
    stride_gh: tl.int64,
    stride_gt: tl.int64,
    stride_gd: tl.int64,
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
    stride_sb: tl.int64,
    stride_st: tl.int64,
    stride_dqb: tl.int64,
    stride_dqh: tl.int64,
    stride_dqt: tl.int64,
    stride_dqd: tl.int64,
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
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head // heads, head % heads
    first = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    row = first + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    row_valid, d_valid = row < queries, d < WIDTH
    row_64 = row.to(tl.int64)
    valid = row_valid[:, None] & d_valid[None, :]
    q_at = q_ptr + b * stride_qb + h * stride_qh + row_64[:, None] * stride_qt + d[None, :] * stride_qd
    g_at = grad_ptr + b * stride_gb + h * stride_gh + row_64[:, None] * stride_gt + d[None, :] * stride_gd
    q = tl.load(q_at, mask=valid, other=0.0)
    grad = tl.load(g_at, mask=valid, other=0.0)
    lse = tl.load(lse_ptr + head * queries + row_64, mask=row_valid, other=0.0)
    delta = tl.load(delta_ptr + head * queries + row_64, mask=row_valid, other=0.0)
    last = tl.where(row_valid, row + (keys - queries), -1)
    end = tl.minimum(keys, first + BLOCK_Q + keys - queries)
    begin = 0
    start = tl.zeros([BLOCK_Q], tl.int32)
    if HAS_STARTS:
        starts_at = starts_ptr + b * stride_sb + row_64 * stride_st
        start = tl.load(starts_at, mask=row_valid, other=2147483647).to(tl.int32)
        begin = tl.maximum(tl.min(start, 0), 0) // BLOCK_K * BLOCK_K

    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for key in range(begin, end, BLOCK_K):
        column = key + tl.arange(0, BLOCK_K)
        column_64 = column.to(tl.int64)
        k_valid = (column < keys)[:, None] & d_valid[None, :]
        k_at = k_ptr + b * stride_kb + h * stride_kh + column_64[:, None] * stride_kt + d[None, :] * stride_kd
        v_at = v_ptr + b * stride_vb + h * stride_vh + column_64[:, None] * stride_vt + d[None, :] * stride_vd
        k = tl.load(k_at, mask=k_valid, other=0.0)
        v = tl.load(v_at, mask=k_valid, other=0.0)
        seen = column[None, :] <= last[:, None]
        if HAS_STARTS:
            seen = seen & (column[None, :] >= start[:, None])
        exponent = tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None]
        p = tl.exp2(tl.where(seen, exponent, float("-inf")) * LOG2_E)
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")

    dq_at = dq_ptr + b * stride_dqb + h * stride_dqh + row_64[:, None] * stride_dqt + d[None, :] * stride_dqd
    tl.store(dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=valid)
