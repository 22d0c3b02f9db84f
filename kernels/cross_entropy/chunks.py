"""The head's product and the loss over chunks of rows, so that the logits of all rows never exist at once.

Gradients are taken in the forward pass: a chunk's logits become their own gradients in place and are
multiplied on at once. Those of the weight and the bias are summed over the chunks in float32.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kernels.cross_entropy.reference import divisor, statistics_dtype
from kernels.linear.reference import has_matrix_units
from kernels.operands import Operands, in_bytes

CPU_BYTES = (
    8 * 2**20
)  # of a chunk's logits: they stay in the outer cache between product, softmax and product
GPU_BYTES = 256 * 2**20  # enough rows for the products to fill a GPU
FEWEST_ROWS = 320  # on fewer the products lose more than the cache gives
ALIGNMENT = 16  # elements: products into rows that start anywhere take 1.4 times as long


class RowPass(Protocol):
    """`reference.in_place` or one that is faster."""

    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        mask: Tensor | None,
        coefficient: Tensor | float,
        differentiate: bool,
        /,
    ) -> Tensor: ...


class Products(Protocol):
    """The three products of a chunk, into memory that is there. Gradients without elements are not needed."""

    def logits(self, chunk: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, /) -> None: ...
    def add_to_layer(self, gradient: Tensor, chunk: Tensor, dweight: Tensor, dbias: Tensor, /) -> None: ...
    def of_rows(self, gradient: Tensor, matrix: Tensor, out: Tensor, /) -> None: ...


class TorchProducts:
    """By torch's libraries, of what the operands become."""

    def __init__(self, operands: Operands) -> None:
        self.operands = operands

    def _factor(self, x: Tensor, axis: int) -> Tensor:
        return in_bytes(x, axis) if self.operands == "int8" else x

    def logits(self, chunk: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, /) -> None:
        left, right = self._factor(chunk, 1), self._factor(matrix, 1).t()
        if bias is None:
            torch.mm(left, right, out=out)
        else:
            torch.addmm(bias, left, right, out=out)

    def add_to_layer(self, gradient: Tensor, chunk: Tensor, dweight: Tensor, dbias: Tensor, /) -> None:
        if dweight.numel():
            left, right = self._factor(gradient, 0).t(), self._factor(chunk, 0)
            if dweight.dtype == chunk.dtype:
                dweight.addmm_(left, right)
            else:
                dweight += left @ right
        if dbias.numel():
            dbias += gradient.sum(0, dtype=dbias.dtype)

    def of_rows(self, gradient: Tensor, matrix: Tensor, out: Tensor, /) -> None:
        out.copy_(self._factor(gradient, 1) @ self._factor(matrix, 0))


class Chunked:
    """`linear_cross_entropy` around one way to turn a chunk's logits into losses and gradients."""

    def __init__(self, rows: RowPass, products: Callable[[Operands], Products] = TorchProducts) -> None:
        self.rows = rows
        self.products = products

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        mask: Tensor | None,
        mean: bool,
        operands: Operands,
        need_x: bool,
        need_weight: bool,
        need_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The loss, and the gradients of x, weight and bias for an upstream one of 1, empty if not needed."""
        kind, products = product_dtype(x, operands), self.products(operands)
        wide = torch.float64 if kind == torch.float64 else torch.float32
        matrix, shift = weight.to(kind), None if bias is None else bias.to(kind)
        dx = x.new_empty(x.shape if need_x else 0)
        dweight = weight.new_zeros(weight.shape if need_weight else 0, dtype=wide)
        dbias = weight.new_zeros(weight.shape[0] if need_bias else 0, dtype=wide)
        losses = []
        over = divisor(targets, mask, mean)
        size, buffer = _buffer(x, weight.shape[0], kind)
        for start in range(0, len(x), size):
            part = slice(start, min(start + size, len(x)))
            chunk, logits = x[part].to(kind), buffer[: part.stop - start]
            products.logits(chunk, matrix, shift, logits)
            counts = None if mask is None else mask[part]
            needed = need_x or need_weight or need_bias
            losses.append(self.rows(logits, targets[part], counts, 1 / over, needed))
            if need_x:
                products.of_rows(logits, matrix, dx[part])
            if need_weight or need_bias:
                products.add_to_layer(logits, chunk, dweight, dbias)
        total = torch.cat(losses).sum() if losses else x.new_zeros((), dtype=wide)
        loss = (total / over).to(statistics_dtype(x))
        return loss, dx, dweight.to(weight.dtype), dbias if bias is None else dbias.to(bias.dtype)


def product_dtype(x: Tensor, operands: Operands) -> torch.dtype:
    """The dtype of the products: x's own, or for "half" bfloat16; without matrix units float32 instead."""
    kind = torch.bfloat16 if operands == "half" and x.dtype == torch.float32 else x.dtype
    return torch.float32 if kind == torch.bfloat16 and not has_matrix_units(x.device) else kind


def _buffer(x: Tensor, columns: int, kind: torch.dtype) -> tuple[int, Tensor]:
    """Rows of a chunk, and storage for its logits whose rows are aligned."""
    stride = -(-columns // ALIGNMENT) * ALIGNMENT
    budget = CPU_BYTES if x.device.type == "cpu" else GPU_BYTES
    rows = max(1, min(len(x), max(FEWEST_ROWS, budget // (stride * kind.itemsize))))
    return rows, x.new_empty((rows, stride), dtype=kind)[:, :columns]
