"""Bugs for `test_planted_bugs.py`."""

import pytest
import torch

from kernels.flash_attention import triton_backward, triton_forward
from tests.kernels.flash_attention.running import among_nan
from tests.kernels.flash_attention.test_flash_attention import (
    Tensors,
    assert_accurate,
    attend,
    causal,
    every_other,
    heads_last,
    permuted,
    problem,
    test_near_overflowing_scores_stay_finite,
    test_offsets_beyond_32_bits,
    test_rows_that_see_no_key_give_zero_and_finite_gradients,
    test_starts_beyond_the_own_position_hide_everything,
    test_the_log_sum_exp_is_that_of_the_scores,
)
from tests.kernels.planting import Patch

LAYOUTS = (permuted, every_other, heads_last, among_nan)


def check(inputs: Tensors, starts: torch.Tensor | None = None) -> None:
    queries, keys = inputs[0].shape[2], inputs[1].shape[2]
    seen = causal(queries, keys)
    if starts is not None:
        seen = seen & (torch.arange(keys) >= starts[:, None, :, None])
    assert_accurate(attend(inputs, starts), inputs, seen)


def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More keys than queries, layouts, blocks and documents, blind rows, extremes, offsets beyond 32 bits."""
    q, *others = problem((1, 1, 3, 70, 4))
    check([3 * q, *others])
    inputs = problem((2, 2, 3, 5, 6))
    for turn in range(4):  # every tensor has strides of its own
        check([LAYOUTS[(i + turn) % 4](x) for i, x in enumerate(inputs)])
    check(problem((1, 1, 33, 34, 4)))
    starts = torch.tensor([[0] * 2 + [2] * 34 + [36] * 4, [0] * 33 + [33] * 7]).T.contiguous().T
    check(problem((2, 1, 40, 40, 4)), starts)
    check(problem((1, 2, 32, 33, 20), torch.bfloat16))
    test_rows_that_see_no_key_give_zero_and_finite_gradients("triton", 7, 1)
    test_starts_beyond_the_own_position_hide_everything("triton")
    test_the_log_sum_exp_is_that_of_the_scores("triton")
    test_near_overflowing_scores_stay_finite("triton", torch.float32)
    test_offsets_beyond_32_bits("triton")


FORWARD = (
    ("column[None, :] <= last", "column[None, :] < last"),
    ("row + (keys - queries)", "row"),
    ("total * shrink + ", "total + "),
    ("out * shrink[:, None]", "out"),
    ("highest + tl.log(", "highest - tl.log("),
    ('tl.dot(q, k, input_precision="ieee") * scale', 'tl.dot(q, k, input_precision="ieee")'),
    ("column_valid = column < keys", "column_valid = column <= keys"),
    ("row_valid, d_valid = row < queries", "row_valid, d_valid = row <= queries"),
    ("column_64[:, None] * stride_vt", "column_64[:, None] * stride_kt"),
    ("            seen = seen & (column[None, :] >= start[:, None])", "            seen = seen"),
    ('tl.where(higher == float("-inf"), 0.0, higher)', "higher"),
    ("tl.maximum(highest, tl.max(scores, 1))", "tl.maximum(highest, 0.0)"),
    ("column[None, :] >= start", "column[None, :] > start"),
    ("(blocks - 1 - tl.program_id(0) % blocks)", "(tl.program_id(0) % blocks - 1)"),
    ("d < WIDTH", "d <= WIDTH"),
    ("h * stride_qh", "(h * stride_qh).to(tl.int32)"),
    ('tl.where(none, float("-inf"), highest', "tl.where(none, 0.0, highest"),
    ("b * stride_sb", "b * 0"),
    ("row_64 * stride_st", "row_64"),
    ("lse_ptr + head * queries", "lse_ptr + b * queries"),
    ("b, h = head // heads, head % heads", "b, h = head % heads, head // heads"),
    ("row_64[:, None] * stride_ot", "row_64[:, None] * stride_qt"),
    ("        highest = higher", "        highest = tl.max(scores, 1)"),
    ("tl.min(start, 0), 0)", "tl.max(start, 0), 0)"),
    ("first + BLOCK_Q + keys - queries", "first + BLOCK_Q"),
)

DELTA = (
    ("tl.sum(grad * out, 1)", "tl.sum(grad * grad, 1)"),
    ("tl.sum(grad * out, 1)", "-tl.sum(grad * out, 1)"),
    ("b * stride_gb", "b * stride_ob"),
    ("h * stride_gh", "h * stride_oh"),
    ("row[:, None] * stride_gt", "row[:, None] * stride_ot"),
    ("d[None, :] * stride_gd", "d[None, :] * stride_od"),
    ("h * stride_oh", "h * stride_gh"),
    ("valid = (row < queries)[:, None]", "valid = (row <= queries)[:, None]"),
    ("(d < WIDTH)", "(d <= WIDTH)"),
    ("delta_ptr + head * queries", "delta_ptr + h * queries"),
    ("mask=row < queries", "mask=row <= queries"),
    ("b, h = head // heads, head % heads", "b, h = head % heads, head // heads"),
    ("(tl.program_id(0) % blocks).to(tl.int64) * BLOCK_Q", "(tl.program_id(0) % blocks).to(tl.int64)"),
    ("tl.cdiv(queries, BLOCK_Q)", "queries // BLOCK_Q + 1"),
    ("h * stride_gh", "(h * stride_gh).to(tl.int32)"),
)

KEYS = (
    ("row[None, :] + (keys - queries)", "row[None, :]"),
    ("column[:, None] <= row", "column[:, None] < row"),
    ("scale - lse[None, :]", "scale"),
    ("p * (dp - delta[None, :])", "p * dp"),
    ("p * (dp - delta[None, :])", "dp - delta[None, :]"),
    ("(dk * scale)", "dk"),
    ("column_64[:, None] * stride_vt", "column_64[:, None] * stride_kt"),
    ("first_seeing // BLOCK_Q * BLOCK_Q", "first_seeing // BLOCK_Q * BLOCK_Q + BLOCK_Q"),
    (", dk, input_precision", ", input_precision"),
    ("row_valid = row < queries", "row_valid = row <= queries"),
    ("valid = (column < keys)", "valid = (column <= keys)"),
    ("h * stride_gh", "h * stride_qh"),
    ("row_64 * stride_st", "row_64"),
    ("column_64[:, None] * stride_dvt", "column_64[:, None] * stride_vt"),
    ("h * stride_qh", "(h * stride_qh).to(tl.int32)"),
    ("tl.dot(v, tl.trans(grad)", "tl.dot(k, tl.trans(grad)"),
    ("lse_ptr + head * queries", "lse_ptr + h * queries"),
    ("column[:, None] >= start", "column[:, None] > start"),
    ("key - (keys - queries), 0)", "key, 0)"),
    (", dv, input_precision", ", input_precision"),
    ("            seen = seen & (column[:, None] >= start[None, :])", "            seen = seen"),
)

QUERIES = (
    ("column[None, :] <= last", "column[None, :] < last"),
    ("row + (keys - queries)", "row"),
    ("scale - lse[:, None]", "scale"),
    ("dp - delta[:, None]", "dp + delta[:, None]"),
    ("(dq * scale)", "dq"),
    ("tl.dot(grad, tl.trans(v)", "tl.dot(grad, tl.trans(k)"),
    ("column_64[:, None] * stride_vt", "column_64[:, None] * stride_kt"),
    ("(column < keys)", "(column <= keys)"),
    ("            seen = seen & (column[None, :] >= start[:, None])", "            seen = seen"),
    ("row_valid, d_valid = row < queries", "row_valid, d_valid = row <= queries"),
    ("delta_ptr + head * queries", "delta_ptr + h * queries"),
    ("row_64[:, None] * stride_dqt", "row_64[:, None] * stride_qt"),
    ("b * stride_sb", "b * 0"),
    ("tl.min(start, 0), 0)", "tl.max(start, 0), 0)"),
    ("h * stride_gh", "(h * stride_gh).to(tl.int32)"),
    ("h * stride_kh", "h * stride_vh"),
    ("d[None, :] * stride_gd", "d[None, :] * stride_qd"),
    ("column[None, :] >= start", "column[None, :] > start"),
    ("first + BLOCK_Q + keys - queries", "first + BLOCK_Q"),
    (", dq, input_precision", ", input_precision"),
)

PATCHES = (
    Patch(triton_forward, "_flash_forward_kernel", checks, FORWARD),
    Patch(triton_backward, "_flash_delta_kernel", checks, DELTA),
    Patch(triton_backward, "_flash_keys_kernel", checks, KEYS),
    Patch(triton_backward, "_flash_queries_kernel", checks, QUERIES),
)
