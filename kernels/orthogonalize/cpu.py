"""Orthogonalisation by the compiled CPU code, kernels/native/orthogonalize.cpp: float32 on CPUs with AVX2.

One thread works on a matrix from start to end, in memory of its own that it keeps: twice the matrix and twice
the square of its shorter side. Large matrices that are fewer than the threads are shared among these.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.native import Integer, Pointer, function

LARGEST = 1 << 22  # elements of a matrix, 4,096 x 1,024: a thread keeps 40 MiB for it
NARROWEST = 48  # what a side takes up at least

_native = function("riftco_orthogonalize", Pointer, Pointer, *[Integer] * 4)

built = _native is not None


def orthogonalize(matrices: Tensor) -> Any:
    """As `reference.orthogonalize`; NotImplemented for other dtypes, larger matrices, or without the code."""
    rows, columns = matrices.shape[-2:]
    large = max(rows, NARROWEST) * max(columns, NARROWEST) > LARGEST
    if _native is None or matrices.dtype != torch.float32 or large:
        return NotImplemented
    matrices = matrices.contiguous()
    out = torch.empty_like(matrices)
    if out.numel():
        sizes = (out.numel() // (rows * columns), rows, columns, torch.get_num_threads())
        _native(matrices.data_ptr(), out.data_ptr(), *sizes)
    return out
