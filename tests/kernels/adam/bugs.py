"""Bugs for `test_planted_bugs.py`."""

import pytest

from kernels.adam import triton_adam
from tests.kernels.adam.test_adam import (
    test_a_step_that_bounds_do_not_settle_is_still_done,
    test_a_step_that_is_not_allowed_changes_nothing,
    test_steps_are_those_of_the_contract,
    test_what_is_measured_on_a_gpu_is_exact,
)
from tests.kernels.planting import Patch


def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tensors, chunks and blocks: the sum in the order of all implementations, and the extremes."""
    test_what_is_measured_on_a_gpu_is_exact(monkeypatch)


def updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """New values to the bit, of small gradients and in pages; what is not finite, and what seems so."""
    test_a_step_that_is_not_allowed_changes_nothing("triton", "parameter nan", monkeypatch)
    test_a_step_that_is_not_allowed_changes_nothing("triton", "second moment infinite", monkeypatch)
    test_a_step_that_is_not_allowed_changes_nothing("triton", "first moment nan", monkeypatch)
    test_a_step_that_bounds_do_not_settle_is_still_done("triton", monkeypatch)
    test_steps_are_those_of_the_contract("triton", 1e-5, monkeypatch)


SQUARES = (
    ("sums += value * value", "sums = value * value"),
    ("other=0.0).to(tl.float64)", "other=0.0)"),
    ("mask=i < count", "mask=i <= count"),
    ("other=0.0", "other=1.0"),
    ("program - tl.load(firsts_ptr + owner)", "program"),
    ("* ROWS * COLUMNS", "* COLUMNS"),
    ("range(ROWS)", "range(ROWS - 1)"),
    ("(2, COLUMNS >> (level + 1))), axis=0", "(COLUMNS >> (level + 1), 2)), axis=1"),
    ("_floats(tl.load(arrays_ptr + 2 * owner))", "_floats(tl.load(arrays_ptr))"),
    ("out_ptr + program", "out_ptr + owner"),
    ("i += COLUMNS", "i += COLUMNS - 1"),
    ("value * value", "tl.abs(value)"),
    ("owners_ptr + program", "owners_ptr"),
)

EXTREMES = (
    ("_largest(parameter_ptr, i, mask, True)", "_largest(parameter_ptr, i, mask, False)"),
    ("_largest(first_ptr, i, mask, True)", "_largest(first_ptr, i, mask, False)"),
    ("_largest(second_ptr, i, mask, False)", "_largest(second_ptr, i, mask, True)"),
    ("_largest(second_ptr, i", "_largest(first_ptr, i"),
    ("_largest(first_ptr, i", "_largest(second_ptr, i"),
    ("_largest(parameter_ptr, i", "_largest(first_ptr, i"),
    ("parameter_ptr, _, first_ptr", "_, parameter_ptr, first_ptr"),
    ("3 * tl.program_id", "2 * tl.program_id"),
    ("firsts_ptr, BLOCK)", "firsts_ptr, BLOCK // 2)"),
    ("out + 2", "out + 1"),
    ("out + 1", "out + 2"),
    ("_largest(parameter_ptr, i, mask", "_largest(parameter_ptr, i, i >= 0"),
)

SEGMENT = (
    ("5 * owner", "4 * owner"),
    ("row_ptr + 4", "row_ptr + 4 - 5"),
    ("i < tl.load", "i <= tl.load"),
    ("program - tl.load(firsts_ptr + owner)", "program"),
    ("* BLOCK + tl.arange", "+ tl.arange"),
    ("owners_ptr + program", "owners_ptr"),
    ("firsts_ptr + owner", "firsts_ptr"),
    ("_floats(tl.load(row_ptr + 2))", "_floats(tl.load(row_ptr + 3))"),
    ("_floats(tl.load(row_ptr + 1))", "_floats(tl.load(row_ptr))"),
    ("_floats(tl.load(row_ptr + 3))", "_floats(tl.load(row_ptr + 2))"),
)

UPDATE = (
    ("m / correction1 * rate", "m * rate"),
    ("tl.sqrt(v / correction2)", "tl.sqrt(v)"),
    ("tl.sqrt(v / correction2) + epsilon", "tl.sqrt(v / correction2 + epsilon)"),
    ("to(tl.float64) * clip", "to(tl.float64)"),
    ("g * (1.0 - beta1)", "g * beta1"),
    ("g * (1.0 - beta2) * g", "g * (1.0 - beta2)"),
    (" & _is_finite(v.to(tl.float32))", ""),
    ("_is_finite(theta) & ", ""),
    ("other=0.0).to(tl.float64) * beta2", "other=0.0) * beta2.to(tl.float32)"),
    ("        tl.store(second_ptr + i, v.to(tl.float32), mask=mask)\n", ""),
    ("(parameter - m", "(parameter + m"),
    ("tl.min(finite", "tl.max(finite"),
    ("    if WRITE:\n        tl.store(parameter", "    if True:\n        tl.store(parameter"),
    ("finite_ptr + tl.program_id(0).to(tl.int64)", "finite_ptr"),
    ("settings_ptr + 4", "settings_ptr + 3"),
    ("settings_ptr + 2)", "settings_ptr + 1)"),
    ("tl.store(first_ptr + i, m.to(tl.float32)", "tl.store(first_ptr + i, g.to(tl.float32)"),
)

PATCHES = (
    Patch(triton_adam, "_squares_kernel", measured, SQUARES),
    Patch(triton_adam, "_extremes_kernel", measured, EXTREMES),
    Patch(triton_adam, "_segment", updated, SEGMENT),
    Patch(triton_adam, "_update_kernel", updated, UPDATE),
)
