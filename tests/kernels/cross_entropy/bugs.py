"""Bugs for `test_planted_bugs.py`."""

import pytest
import torch

from kernels.cross_entropy import triton_cross_entropy
from tests.kernels.cases import every_other, far_apart, random
from tests.kernels.cross_entropy.test_cross_entropy import (
    check,
    mask_for,
    targets_for,
    test_logits_near_overflow_and_excluded_entries_are_exact,
    test_where_it_cannot_be_refused_a_target_outside_gives_nan,
)
from tests.kernels.planting import Patch


def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several blocks, rows that do not count, strides, extremes, offsets beyond 32 bits."""
    monkeypatch.setattr(triton_cross_entropy, "BLOCK", 16)
    logits = random(5, 35)
    targets, mask = targets_for(logits), mask_for(targets_for(logits))
    check(logits, targets, None, "mean", 1.0)
    check(every_other(logits), targets, None, "sum", -2.5)
    targets[~mask] = -100
    check(logits.bfloat16(), targets, mask, "mean", 3.0)
    test_logits_near_overflow_and_excluded_entries_are_exact(None)
    for target in (-1, 5, 2**40):
        test_where_it_cannot_be_refused_a_target_outside_gives_nan(triton_cross_entropy, target)
    check(far_apart(random(2, 16, dtype=torch.bfloat16)), torch.tensor([3, 4]), None, "mean", 1.0)


FORWARD = (
    ("total * tl.exp(before - origin)", "total"),
    ("tl.maximum(largest, tl.max(value, axis=0))", "tl.max(value, axis=0)"),
    ("tl.maximum(largest, tl.max(value, axis=0))", "0.0"),
    ('mask=c < columns, other=float("-inf")', "mask=c < columns, other=0.0"),
    ("mask=c < columns", "mask=c <= columns"),
    ("range(0, seen, BLOCK)", "range(0, seen - BLOCK + 1, BLOCK)"),
    ("row_ptr + c * stride_lc", "row_ptr + c"),
    ("r * stride_lr", "r * columns"),
    ("r * stride_lr", "(r * stride_lr).to(tl.int32)"),
    ("row_ptr + target * stride_lc", "row_ptr + target"),
    ("mask=valid & (seen > 0)", "mask=seen > 0"),
    ("tl.where(seen > 0, loss, 0.0)", "loss"),
    ('tl.where(largest == float("-inf"), 0.0, largest)', "largest"),
    ("(hit - largest)", "hit"),
    ("(target >= 0) & (target < columns)", "target < columns"),
    ('tl.where(valid, tl.log(total) - (hit - largest), float("nan"))', "tl.log(total) - (hit - largest)"),
    ("statistics_ptr + 2 * r, largest", "statistics_ptr + r, largest"),
    ("+ 2 * r + 1, total", "+ 2 * r + 1, tl.log(total)"),
)

BACKWARD = (
    ("c == target", "c == target + 1"),
    ("tl.where(c == target, 1.0, 0.0)", "0.0"),
    (" / total", ""),
    ("value - largest", "value"),
    ("tl.where(c == target, 1.0, 0.0)) * coefficient", "tl.where(c == target, 1.0, 0.0))"),
    ("tl.load(coefficient_ptr)", "tl.load(coefficient_ptr + r)"),
    ("tl.where(c < seen, gradient, 0.0)", "gradient"),
    ("mask=c < columns)", "mask=c < seen)"),
    ("mask=c < columns)", "mask=c <= columns)"),
    ("range(0, columns, BLOCK)", "range(0, seen, BLOCK)"),
    ("range(0, columns, BLOCK)", "range(0, columns - BLOCK + 1, BLOCK)"),
    ("r * stride_or", "r * stride_lr"),
    ("c * stride_lc", "c"),
    ("r * stride_lr", "r * stride_or"),
    ("r * stride_lr", "(r * stride_lr).to(tl.int32)"),
    ("statistics_ptr + 2 * r)", "statistics_ptr + r)"),
    ("statistics_ptr + 2 * r + 1", "statistics_ptr + 2 * r"),
    ("(target >= 0) & (target < columns)", "target < columns"),
    ("(target >= 0) & (target < columns)", "target >= 0"),
)

PATCHES = (
    Patch(triton_cross_entropy, "_cross_entropy_forward_kernel", checks, FORWARD),
    Patch(triton_cross_entropy, "_cross_entropy_backward_kernel", checks, BACKWARD),
)
