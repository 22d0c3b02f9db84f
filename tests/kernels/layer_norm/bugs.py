"""Bugs for `test_planted_bugs.py`."""

import pytest
import torch

from kernels.layer_norm import triton_layer_norm
from tests.kernels.cases import concatenated, far_apart
from tests.kernels.layer_norm.test_layer_norm import (
    check,
    gradients,
    inputs,
    test_the_norm_is_that_of_the_rounded_sum,
    test_the_variance_is_exact_far_from_zero,
)
from tests.kernels.planting import Patch


def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges of tiles, layouts of their own, bf16, offsets beyond 32 bits, several tiles in a program."""
    x, scale, bias, residual = inputs(19, 21)
    upstream = gradients(19, 21)
    check([concatenated(x), scale, bias, residual], [upstream[0], concatenated(upstream[1])])
    check([x, scale, bias, concatenated(residual)], [concatenated(upstream[0]), upstream[1]])
    check(inputs(17, 127, fused=False), gradients(17, 127))
    test_the_variance_is_exact_far_from_zero(None)
    test_the_norm_is_that_of_the_rounded_sum(None)
    given, upstream = inputs(2, 16, dtype=torch.bfloat16), gradients(2, 16, dtype=torch.bfloat16)
    check([far_apart(given[0]), *given[1:3], far_apart(given[3])], [far_apart(g) for g in upstream])
    check([far_apart(given[0]), *given[1:3], None], upstream)
    monkeypatch.setattr(triton_layer_norm, "PARTS", 2)
    check(inputs(70, 5), gradients(70, 5))


FORWARD = (
    ("tl.sum(wide, axis=1) / columns", "tl.sum(wide, axis=1) / BLOCK"),
    ("tl.where(mask, wide - mean[:, None], 0.0)", "wide - mean[:, None]"),
    ("tl.sum(centred * centred, axis=1) / columns", "tl.sum(centred * centred, axis=1) / (columns - 1)"),
    (
        "tl.sum(centred * centred, axis=1) / columns",
        "(tl.sum(wide * wide, axis=1) / columns - mean * mean)",
    ),
    ("/ columns + epsilon)", "/ columns) + epsilon"),
    ("tl.sqrt(", "(1.0 * "),
    (
        "(x.to(tl.float32) + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)",
        "x.to(tl.float32) + residual.to(tl.float32)",
    ),
    ("x.to(tl.float32) + residual.to(tl.float32)", "x.to(tl.float32)"),
    ("r[:, None] * stride_rr", "r[:, None] * stride_xr"),
    ("total_ptr + r[:, None] * stride_yr", "total_ptr + r[:, None] * stride_xr"),
    (" * scale[None, :] + bias[None, :]", " * (scale[None, :] + bias[None, :])"),
    ("scale_ptr + c, mask=c < columns, other=0.0", "scale_ptr + c"),
    ("mean, mask=r < rows", "mean, mask=r >= 0"),
    ("(c < columns)[None, :]", "(c >= 0)[None, :]"),
    ("r[:, None] * stride_xr", "(r[:, None] * stride_xr).to(tl.int32)"),
    ("tl.program_id(0).to(tl.int64) * ROWS", "tl.program_id(0).to(tl.int64)"),
    ("rstd_ptr + r, rstd", "rstd_ptr + r, 1.0 / rstd"),
)

BACKWARD = (
    ("scaled - m1[:, None] - normed", "scaled - normed"),
    (" - normed * m2[:, None]", ""),
    ("tl.sum(scaled, axis=1) / columns", "tl.sum(scaled, axis=1) / BLOCK"),
    ("tl.sum(scaled * normed, axis=1) / columns", "tl.sum(scaled, axis=1) / columns"),
    ("m2[:, None]) * rstd[:, None]", "m2[:, None])"),
    ("g * scale[None, :]", "g"),
    ("dx += extra.to(tl.float32)", "dx += extra.to(tl.float32) * rstd[:, None]"),
    ("dx += extra.to(tl.float32)", "dx = extra.to(tl.float32)"),
    ("r[:, None] * stride_er", "r[:, None] * stride_gr"),
    ("r[:, None] * stride_gr", "r[:, None] * stride_xr"),
    ("r[:, None] * stride_xr", "r[:, None] * stride_dr"),
    ("r[:, None] * stride_dr", "r[:, None] * stride_gr"),
    ("r[:, None] * stride_xr", "(r[:, None] * stride_xr).to(tl.int32)"),
    ("tl.sum(g * normed, axis=0)", "tl.sum(scaled * normed, axis=0)"),
    ("tl.sum(g, axis=0)", "tl.sum(scaled, axis=0)"),
    ("dscale += ", "dscale = "),
    ("part * 2 * columns", "part * columns"),
    ("(part * 2 + 1)", "(part * 2)"),
    ("dbias, mask=c < columns", "dbias, mask=c >= 0"),
    ("(part * tiles + tile)", "(part + tile)"),
)

PATCHES = (
    Patch(triton_layer_norm, "_layer_norm_forward_kernel", checks, FORWARD),
    Patch(triton_layer_norm, "_layer_norm_backward_kernel", checks, BACKWARD),
)
