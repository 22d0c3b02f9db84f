"""Products with a packed weight, a panel of it at a time decoded for the matrix routines of the device.

Never more than PANEL elements of the weight, or 64 rows or columns, exist as floats. The forward takes panels
of rows, the backward panels of columns: each element of a result is one complete sum, and nothing is
accumulated in memory.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.nf4.packed import Weight

PANEL = 2**20

# (w, first row, first column, out): fills out, a contiguous matrix, with that rectangle of the weight.
Decode = Callable[[Weight, int, int, Tensor], None]

# (out, x, panel, part): out = x panel, and what a whole product adds to these columns of its result.
Multiply = Callable[[Tensor, Tensor, Tensor, slice], None]


def forward(
    x: Tensor, w: Weight, bias: Tensor | None, decode: Decode, multiply: Multiply | None = None
) -> Tensor:
    """y [n, rows] = x [n, columns] W^T + bias; another way to multiply brings the bias itself."""
    y = x.new_empty(len(x), w.rows)
    wide = _for_products(x)
    multiply = multiply or _with(bias)
    for first, last, panel in _panels(w.rows, w.columns, wide):
        decode(w, first, 0, panel)
        multiply(y[:, first:last], wide, panel.T, slice(first, last))
    return y


def backward(upstream: Tensor, w: Weight, decode: Decode, multiply: Multiply | None = None) -> Tensor:
    """The gradient of x [n, columns] = upstream [n, rows] W."""
    gradient = upstream.new_empty(len(upstream), w.columns)
    wide = _for_products(upstream)
    multiply = multiply or _with(None)
    for first, last, panel in _panels(w.columns, w.rows, wide):
        panel = panel.view(w.rows, last - first)
        decode(w, 0, first, panel)
        multiply(gradient[:, first:last], wide, panel, slice(first, last))
    return gradient


def _panels(count: int, length: int, like: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Equal ranges of `count` rows (or columns) of that length, and a matrix for each, one after another.

    All matrices are one buffer, so that its pages are faulted in once.
    """
    parts = -(-count * length // PANEL)
    step = -(-count // max(parts, 1) // 64) * 64  # whole blocks, most often
    buffer = like.new_empty(min(step, count) * length)
    for first in range(0, count, step):
        last = min(first + step, count)
        yield first, last, buffer[: (last - first) * length].view(last - first, length)


def _for_products(x: Tensor) -> Tensor:
    """CPUs multiply bf16 matrices no faster than float32, and the weight would lose digits."""
    return x.float() if x.device.type == "cpu" and x.dtype == torch.bfloat16 else x


def _with(bias: Tensor | None) -> Multiply:
    """By torch, written in place where the dtypes agree."""

    def multiply(out: Tensor, x: Tensor, panel: Tensor, part: slice) -> None:
        if out.dtype == x.dtype:
            torch.mm(x, panel, out=out) if bias is None else torch.addmm(bias[part], x, panel, out=out)
            return
        product = torch.mm(x, panel)
        out.copy_(product if bias is None else product.add_(bias[part]))

    return multiply
