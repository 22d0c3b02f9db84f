"""Bugs for `test_planted_bugs.py`."""

import pytest
import torch

from kernels.gelu import triton_gelu
from tests.kernels.cases import concatenated, every_other, far_apart, permuted, random
from tests.kernels.gelu.test_gelu import check, test_the_sum_with_the_bias_is_not_rounded
from tests.kernels.planting import Patch


def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges of tiles, layouts of their own, bf16, offsets beyond 32 bits, several tiles in a program."""
    check(random(17, 130), random(130, seed=2), random(17, 130, seed=1))
    check(random(17, 128), None, random(17, 128, seed=1))
    x, upstream, bias = random(17, 37), random(17, 37, seed=1), random(37, seed=2)
    check(concatenated(x), bias, permuted(upstream))
    check(permuted(x), bias, every_other(upstream))
    test_the_sum_with_the_bias_is_not_rounded(None)
    near = [random(2, 16, seed=seed, dtype=torch.bfloat16) for seed in (0, 1)]
    check(far_apart(near[0]), None, near[1])
    check(near[0], None, far_apart(near[1]))
    monkeypatch.setattr(triton_gelu, "PARTS", 2)
    check(random(90, 5), random(5, seed=2), random(90, 5, seed=1))


FORWARD = (
    ("x.to(tl.float32) + bias[None, :]", "x.to(tl.float32)"),
    ("x.to(tl.float32) + bias[None, :]", "(x + bias[None, :].to(x.dtype)).to(tl.float32)"),
    ("z * 0.7071067811865476", "z * 0.7071"),
    (
        "tl.math.erf(z * 0.7071067811865476)",
        "(2.0 * tl.sigmoid(1.5957691216 * (z + 0.044715 * z * z * z)) - 1.0)",
    ),
    ("0.5 * z * (1.0", "0.5 * x * (1.0"),
    ("(c < columns)[None, :]", "(c >= 0)[None, :]"),
    ("(r < rows)[:, None]", "(r >= 0)[:, None]"),
    ("mask=c < columns, other=0.0", "mask=c >= 0, other=0.0"),
    ("c[None, :] * stride_xc", "c[None, :]"),
    ("r[:, None] * stride_xr", "r[:, None] * columns"),
    ("r[:, None] * stride_xr", "(r[:, None] * stride_xr).to(tl.int32)"),
    ("r[:, None] * stride_yr", "r[:, None] * stride_xr"),
    ("(part * tiles + tile)", "(part + tile)"),
    ("tl.cdiv(columns, COLUMNS)", "columns // COLUMNS + 1"),
    ("for tile in range(tiles)", "for tile in range(1)"),
)

BACKWARD = (
    ("x.to(tl.float32) + bias[None, :]", "x.to(tl.float32)"),
    ("z * 0.7071067811865476", "z * 0.7071"),
    ("0.3989422804014327", "0.39894"),
    ("-0.5 * z * z", "-0.5 * x * x"),
    ("probability + z * density", "probability + density"),
    ("g.to(tl.float32) * ", ""),
    ("r[:, None] * stride_gr", "r[:, None] * stride_xr"),
    ("c[None, :] * stride_gc", "c[None, :] * stride_xc"),
    ("r[:, None] * stride_gr", "(r[:, None] * stride_gr).to(tl.int32)"),
    ("r[:, None] * stride_xr", "(r[:, None] * stride_xr).to(tl.int32)"),
    ("r[:, None] * stride_dr", "r[:, None] * stride_gr"),
    ("sums += tl.sum(dx, axis=0)", "sums = tl.sum(dx, axis=0)"),
    ("sums += tl.sum(dx, axis=0)", "sums = (sums + tl.sum(dx, axis=0)).to(tl.bfloat16).to(tl.float32)"),
    ("part * columns + c, sums", "c, sums"),
    ("sums, mask=c < columns", "sums, mask=c >= 0"),
    ("(part * tiles + tile)", "(part + tile)"),
    ("(r < rows)[:, None]", "(r >= 0)[:, None]"),
)

PATCHES = (
    Patch(triton_gelu, "_gelu_forward_kernel", checks, FORWARD),
    Patch(triton_gelu, "_gelu_backward_kernel", checks, BACKWARD),
)
