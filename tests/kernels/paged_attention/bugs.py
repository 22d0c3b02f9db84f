"""Bugs for `test_planted_bugs.py`."""

import pytest
import torch

from kernels.paged_attention import triton_forward
from tests.kernels.paged_attention.test_paged_attention import (
    test_errors_are_those_of_contiguous_attention,
    test_layouts_and_integer_types_do_not_matter,
    test_near_overflowing_scores_stay_finite,
    test_offsets_beyond_32_bits,
    test_pages_that_are_not_there_count_as_unseen_on_a_gpu,
    test_sequences_may_have_fewer_new_tokens_than_others,
)
from tests.kernels.planting import Patch


def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are not there, extremes, bf16, fewer new tokens than rows, layouts, far offsets."""
    for page in (5, -3, 2**40):
        test_pages_that_are_not_there_count_as_unseen_on_a_gpu(page)
    test_near_overflowing_scores_stay_finite("triton", torch.float32)
    test_errors_are_those_of_contiguous_attention("triton", torch.bfloat16, 40, 16, 16)
    test_sequences_may_have_fewer_new_tokens_than_others("triton")
    test_layouts_and_integer_types_do_not_matter("triton", torch.int64)
    test_offsets_beyond_32_bits("triton")


BUGS = (
    ("position[None, :] <= last", "position[None, :] < last"),
    ("other=-1).to(tl.int64)", "other=-1).to(tl.int32)"),
    ("table_ptr + s * stride_ts", "table_ptr + h * stride_ts"),
    ("tl.load(page_at, mask=position < end", "tl.load(page_at, mask=position <= end"),
    ("total * shrink + ", "total + "),
    ("out * shrink[:, None]", "out"),
    ("tl.maximum(highest, tl.max(scores, 1))", "tl.maximum(highest, 0.0)"),
    ("(page < page_count)", "(page <= page_count)"),
    ("* scale, float", ", float"),
    ("(position % PAGE_SIZE)", "(position % BLOCK_K)"),
    (" & valid[None, :]\n        scores", "\n        scores"),
    ("(page >= 0) & ", ""),
    ("        highest = higher", "        highest = tl.max(scores, 1)"),
    ('tl.where(higher == float("-inf"), 0.0, higher)', "higher"),
    ("tl.where(row < count, row", "tl.where(row < queries, row"),
    ("tl.cdiv(queries, BLOCK_Q)", "queries // BLOCK_Q + 1"),
    ("s, h = head // heads, head % heads", "s, h = head % heads, head // heads"),
    ("first + BLOCK_Q + length - count", "first + BLOCK_Q + length - queries"),
    ("mask=(row < queries)[:, None]", "mask=(row < count)[:, None]"),
    ("tl.where(total == 0.0, 1.0, total)", "total"),
    ("stride_ts + (position", "stride_ts + (begin + 0 * position"),
    ("stride_tp\n", "1\n"),
    ("lengths_ptr + s", "lengths_ptr + h"),
    ("counts_ptr + s", "counts_ptr + h"),
    ("d[:, None] * stride_kd", "d[:, None] * stride_vd"),
    ("row_64[:, None] * stride_ot", "row_64[:, None] * stride_qt"),
    ("mask=d_valid[:, None] & valid[None, :]", "mask=valid[None, :]"),
    ("v_row = page * stride_vp", "v_row = page * stride_kp"),
    ("row + (length - count)", "row + (length - queries)"),
)

PATCHES = (Patch(triton_forward, "_paged_attention_kernel", checks, BUGS),)
