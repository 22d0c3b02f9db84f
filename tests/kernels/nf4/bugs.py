"""Bugs for `test_planted_bugs.py`."""

import pytest
import torch

from kernels.dispatch import use
from kernels.nf4 import dequantize_nf4, triton_nf4
from tests.kernels.cases import guarded
from tests.kernels.nf4.test_linear import check_product
from tests.kernels.nf4.test_packing import (
    check_against_scalars,
    test_a_scale_of_zero_gives_zeros_without_a_sign,
    test_decoded_scales_stay_between_zero_and_the_largest_float,
    test_ties_zeros_and_extremes_are_exact,
)
from tests.kernels.nf4.weights import normal, weights
from tests.kernels.planting import Patch


def quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd counts, ties, zero blocks, several programs: the bits of a scalar loop."""
    for count in (1, 33, 64, 131):
        check_against_scalars(normal(1, count, seed=count), 32, False, 32)
    check_against_scalars(normal(1, 2080, seed=2), 32, True, 32)
    test_ties_zeros_and_extremes_are_exact("triton")


def decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both encodings of the scales, their bounds, and rectangles that begin inside the weight."""
    for columns in (70, 256, 1030):
        with use("torch"):
            packed = weights(columns, 5)[:2]
            expected = [dequantize_nf4(each) for each in packed]
        for each, weight in zip(packed, expected, strict=True):
            assert torch.equal(dequantize_nf4(each), weight)
            part = torch.full((2, columns - 40), torch.nan)
            triton_nf4.decode(each.fields(), 2, 39, part)
            assert torch.equal(part, weight[2:4, 39 : columns - 1])
    test_decoded_scales_stay_between_zero_and_the_largest_float("triton")
    test_a_scale_of_zero_gives_zeros_without_a_sign("triton")


def multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd numbers of rows and columns, a bias, x of its own layout, rows of the weight for two programs."""
    for packed in weights(70, 17)[:2]:
        check_product(guarded(normal(3, 70)), packed, normal(17))
        check_product(normal(70, 3).T, packed, None)
        check_product(normal(2, 140)[:, :70].bfloat16(), packed, normal(17).bfloat16())


NEAREST = (
    ("distance < least", "distance <= least"),
    ("tl.static_range(1, 16)", "tl.static_range(1, 15)"),
    ("tl.where(closer, distance, least)", "least"),
    ("distance = tl.abs(ratio - ", "distance = (ratio - "),
    ("least = tl.abs(ratio - ", "least = 0.0 * tl.abs(ratio - "),
    ("tl.where(closer, k, code)", "tl.where(closer, k - 1, code)"),
    ("values_ptr + k", "values_ptr + k - 1"),
    ("tl.abs(ratio - tl.load(values_ptr + k))", "tl.abs(tl.abs(ratio) - tl.load(values_ptr + k))"),
    ("tl.static_range(1, 16)", "tl.static_range(2, 16)"),
    ("tl.zeros(ratio.shape, tl.int32)", "tl.full(ratio.shape, 7, tl.int32)"),
)

QUANTIZE = (
    ("low_code = tl.where(empty, 7, ", "low_code = tl.where(empty, 0, "),
    ("high_code = tl.where(odd < count, high_code, 0)", "high_code = high_code"),
    ("low_code | (high_code << 4)", "high_code | (low_code << 4)"),
    ("tl.max(tl.abs(high), axis=1)", "tl.max(tl.abs(low), axis=1)"),
    ("tl.max(tl.abs(low), axis=1)", "tl.max(low, axis=1)"),
    ("tl.div_rn(low, tl.broadcast_to(divisor, low.shape))", "low * (1.0 / divisor)"),
    ("mask=block * BLOCK_SIZE < count", "mask=block * BLOCK_SIZE <= count"),
    ("mask=odd < count, other", "mask=even < count, other"),
    ("tl.program_id(0).to(tl.int64) * BLOCKS", "tl.program_id(0).to(tl.int64)"),
    ("odd = even + 1", "odd = even + BLOCK_SIZE // 2"),
    ("codes_ptr + even // 2", "codes_ptr + even"),
    ("scale, mask=", "scale * scale, mask="),
)

WEIGHTS = (
    ("(element & 1)", "((element + 1) & 1)"),
    ("element // BLOCK_SIZE", "element // (2 * BLOCK_SIZE)"),
    ("offset + group", "group"),
    ("- 128.0", "- 127.0"),
    ("tl.div_rn(ratio, tl.full(ratio.shape, 127.0, tl.float32))", "ratio * (1.0 / 127.0)"),
    ("tl.maximum(scale, 0.0)", "scale"),
    ("tl.minimum(tl.maximum(scale, 0.0), 3.4028234663852886e38)", "tl.maximum(scale, 0.0)"),
    ("block // SCALE_BLOCK_SIZE", "block"),
    ("        return tl.where(scale == 0.0, 0.0, value * scale)", "        return value * scale"),
    ("tl.where(scale == 0.0, 0.0, value * scale)  #", "value * scale  #"),
    ("element >> 1", "element >> 2"),
    ("& 15)", "& 7)"),
)

DECODE = (
    ("(first_row + row)", "row"),
    ("first_column + column", "column"),
    ("% parts) * COLUMNS", "% parts) * out_columns"),
    ("mask = column < out_columns", "mask = column <= out_columns"),
    ("(first_row + row) * row_length", "(first_row + row) * out_columns"),
    ("tl.cdiv(out_columns, COLUMNS)", "out_columns // COLUMNS + 1"),
    ("// parts", "% parts"),
    ("values_ptr, offset, element", "values_ptr, 0.0, element"),
    ("out_ptr + row * stride_out + column", "out_ptr + row * stride_out + first_column + column"),
    ("weight.to(", "tl.abs(weight).to("),
    ("out_ptr + row * stride_out", "out_ptr + row * row_length"),
    ("BLOCK_SIZE, SCALE_BLOCK_SIZE\n", "BLOCK_SIZE, 0\n"),
)

PRODUCT = (
    ("n[:, None] * stride_xn", "n[:, None] * columns"),
    ("k[None, :] * stride_xk", "k[None, :]"),
    (
        "x_mask = (n < count)[:, None] & (k < columns)[None, :]",
        "x_mask = (n < count)[:, None] & (k >= 0)[None, :]",
    ),
    ("x_mask = (n < count)[:, None]", "x_mask = (n >= 0)[:, None]"),
    ("tl.trans(weight), sums,", "tl.trans(weight),"),
    ("sums += tl.load", "sums = tl.load"),
    ("bias_ptr + row, mask=row < rows", "bias_ptr + row, mask=row >= 0"),
    ("y_mask = (n < count)[:, None]", "y_mask = (n >= 0)[:, None]"),
    ("y_mask = (n < count)[:, None] & (row < rows)", "y_mask = (n < count)[:, None] & (row >= 0)"),
    ("wide_row * columns", "wide_row * COLUMNS"),
    ("range(0, columns, COLUMNS)", "range(0, columns - COLUMNS + 1, COLUMNS)"),
    ("n[:, None] * stride_yn", "n[:, None] * stride_xn"),
    ("mask = (row < rows)[:, None] & (k < columns)", "mask = (row < rows)[:, None] & (k >= 0)"),
    ("if BIAS:", "if not BIAS:"),
    ("tl.program_id(0) * ROWS", "tl.program_id(0)"),
)

PATCHES = (
    Patch(triton_nf4, "_nearest", quantized, NEAREST),
    Patch(triton_nf4, "_quantize_kernel", quantized, QUANTIZE),
    Patch(triton_nf4, "_weights", decoded, WEIGHTS),
    Patch(triton_nf4, "_decode_kernel", decoded, DECODE),
    Patch(triton_nf4, "_product_kernel", multiplied, PRODUCT),
)
