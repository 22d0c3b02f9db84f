"""Linear layers by the compiled CPU code, kernels/native/linear.cpp: float32 products with AVX2 or AVX-512.

It reads operands of any layout and does in the product's own pass what else passes over memory: the sum with
bias and residual, the bias gradient, GELU and its derivative. Elsewhere torch's compositions run, and in half
precision on CPUs with matrix units (AMX), which multiply bfloat16 several times faster than anything else.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.linear.reference import has_matrix_units
from kernels.native import Integer, Pointer, function, library, pointer
from kernels.operands import Operands

FEWEST_ROWS = 32  # on fewer, packing the weight costs more than the rest

_product = function("riftco_product", Pointer, Pointer, *[Integer] * 3)
built = _product is not None and library().riftco_lanes() >= 8  # type: ignore[union-attr]

_GELU, _GELU_GRADIENT = 1, 2
_Sizes, _Tensors = Integer * 12, Pointer * 10
_KINDS: dict[Operands, int] = {"full": 0, "half": 1, "int8": 2}


def covers(*tensors: Tensor | None, operands: Operands = "full") -> bool:
    """Whether these are float32, on a CPU with this code, and the first has rows enough.

    In half precision not where the CPU has matrix units; as bytes any number of rows.
    """
    rows = tensors[0].shape[0] if tensors[0] is not None else 0
    if not built or not all(x is None or (x.numel() and x.dtype == torch.float32) for x in tensors):
        return False
    if operands == "half" and has_matrix_units(torch.device("cpu")):
        return False
    return rows >= FEWEST_ROWS or operands == "int8"


def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    start: Tensor | None = None,
    out: Tensor | None = None,
    sums: Tensor | None = None,
    finish: int = 0,
    z: Tensor | None = None,
    other: Tensor | None = None,
    low: tuple[Tensor, Tensor] | None = None,
    operands: Operands = "full",
) -> Tensor:
    """a b + bias + start + low[0] low[1], `[rows, columns]`, in `out` if that is given.

    bias `[columns]`; start may be `out`. sums: receives the sums of the rows of a. low: of few columns and
    rows, both with contiguous rows. finish, z, other: as in native/product.h.
    """
    (rows, depth), columns = a.shape, b.shape[1]
    out = a.new_empty(rows, columns) if out is None else out
    if start is not None and start.stride(1) != 1:
        start = start.contiguous()
    step = 0 if start is None else start.stride(0)
    left, right = low or (None, None)
    rank = (0, 0, 0) if left is None or right is None else (left.stride(0), right.stride(0), left.shape[1])
    sizes = _Sizes(rows, columns, depth, *a.stride(), *b.stride(), step, out.stride(0), *rank)
    bias = None if bias is None else bias.contiguous()
    tensors = _Tensors(*map(pointer, (a, b, bias, start, out, sums, z, other, left, right)))
    _product(sizes, tensors, finish, _KINDS[operands], torch.get_num_threads())  # type: ignore[misc]
    return out


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, operands: Operands
) -> Any:
    """As `reference.forward`; NotImplemented for what `covers` does not."""
    if not covers(x, weight, bias, residual, operands=operands):
        return NotImplemented
    return product(x, weight.t(), bias, start=residual, operands=operands)


def backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    needed: list[bool],
    operands: Operands,
    total: Tensor | None = None,
) -> Any:
    """As `reference.backward`."""
    if not covers(gradient, x, weight, total, operands=operands):
        return NotImplemented
    for_x, for_weight, for_bias = needed
    found = []
    sums = gradient.new_empty(gradient.shape[1]) if for_bias else None
    if for_x:
        found.append(product(gradient, weight, start=total, out=total, operands=operands))
    if for_weight:
        found.append(product(gradient.t(), x, sums=sums, operands=operands))
    elif sums is not None:
        torch.sum(gradient, 0, out=sums)
    return found if sums is None else [*found, sums]


def feed_forward(
    x: Tensor,
    expand: Tensor,
    expand_bias: Tensor,
    project: Tensor,
    project_bias: Tensor,
    residual: Tensor,
    operands: Operands,
) -> Any:
    """As `reference.feed_forward`."""
    if not covers(x, expand, expand_bias, project, project_bias, residual, operands=operands):
        return NotImplemented
    activated = x.new_empty(x.shape[0], expand.shape[0])
    z = product(x, expand.t(), expand_bias, finish=_GELU, other=activated, operands=operands)
    return product(activated, project.t(), project_bias, start=residual, operands=operands), z


def feed_forward_backward(
    gradient: Tensor,
    x: Tensor,
    z: Tensor,
    expand: Tensor,
    project: Tensor,
    needed: list[bool],
    operands: Operands,
) -> Any:
    """As `reference.feed_forward_backward`."""
    if not covers(gradient, x, z, expand, project, operands=operands):
        return NotImplemented
    activated = z.new_empty(z.shape)
    z = z.contiguous()
    dz = product(gradient, project, finish=_GELU_GRADIENT, z=z, other=activated, operands=operands)
    inner = backward(dz, x, expand, needed[:3], operands)
    return inner + backward(gradient, activated, project, [False, *needed[3:]], operands)
