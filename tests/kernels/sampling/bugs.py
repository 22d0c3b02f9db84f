"""Bugs for `test_planted_bugs.py`."""

import pytest
import torch

from kernels.sampling import triton_sample
from tests.kernels.planting import Patch
from tests.kernels.sampling.test_sampling import (
    check_triton,
    doubles,
    test_penalties_that_overflow_name_their_row,
    test_reaching_top_p_exactly_is_enough,
    test_triton_walks_a_row_of_several_blocks,
)


def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries, penalties, the lowest and spoilt logits, every cut and equal logits over several blocks."""
    check_triton(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]]), uniforms=doubles(0.99), top_k=3)
    test_reaching_top_p_exactly_is_enough("triton")
    penalties = {"counts": torch.tensor([[1, 0, 0]] * 2), "presence_penalty": doubles(5, 1)}
    logits = torch.tensor([[2.0, 9.0, 1.0, 9.0, 0.0, 9.0]] * 2)[:, ::2]
    check_triton(logits, uniforms=doubles(0.9, 0.1), **penalties)
    check_triton(torch.full((1, 6), -3e38), uniforms=doubles(0.5))
    test_penalties_that_overflow_name_their_row("triton", -1e30, 1e300)
    test_triton_walks_a_row_of_several_blocks(monkeypatch)


SELECT = (
    ("key <= cut", "key < cut"),
    (" & ((key >> shift) >> 4 == prefix)", ""),
    ("& 15", "& 7"),
    ("above + tl.cumsum(weights, axis=0)", "above + tl.cumsum(weights, axis=0) - weights"),
    ("cumulative >= target if", "cumulative > target if"),
    ("else cumulative > target", "else cumulative >= target"),
    ("buckets < chosen, weights", "buckets <= chosen, weights"),
    ("counts += tl.sum", "counts = tl.sum"),
    ("(prefix << 4)", "(prefix << 3)"),
    ("range(8)", "range(7)"),
    ("(weight >= min_p)", "(weight > min_p)"),
    ("row_ptr + i * stride", "row_ptr + i"),
    ("above + tl.cumsum", "tl.cumsum"),
    ("weights += tl.sum", "weights = tl.sum"),
)

SAMPLE = (
    ("top_k - 1.0, True", "top_k - 2.0, True"),
    ("top_k - above.to(tl.int32)", "top_k"),
    ("row * stride_sr + 2 * stride_ss", "row * stride_sr + stride_ss"),
    ("tl.exp(x - highest)", "tl.exp(x - best)"),
    ("logits_ptr + chosen * stride_lv", "penalized_ptr + chosen * stride_pv"),
    ("tl.where(spoilt > 0, -1, chosen)", "chosen"),
    ("before += ", "before = "),
    ("uniform * total", "uniform"),
    (' & (tl.abs(p) < float("inf"))', ""),
    ("x - highest - tl.log", "x - tl.log"),
    ("tl.maximum(highest, tl.max", "tl.maximum(0.0, tl.max"),
    ("rank = before + tl.cumsum", "rank = tl.cumsum"),
    ("total = above + kept * weight", "total = above"),
    ("        cut = key\n", ""),
    ("penalized_ptr += row * stride_pr", "penalized_ptr += row * stride_lr"),
    ("uniforms_ptr + row", "uniforms_ptr"),
    ("tl.where(i < vocabulary, x, ", "tl.where(i >= 0, x, "),
    ("exponentials += ", "exponentials = "),
    ("top_p * total", "top_p"),
    ("tl.ceil(", "tl.floor("),
    ("spoilt += ", "spoilt = "),
    ("total += kept * _weight", "total += _weight"),
)

PATCHES = (
    Patch(triton_sample, "_select", checks, SELECT),
    Patch(triton_sample, "_sample_kernel", checks, SAMPLE),
)
