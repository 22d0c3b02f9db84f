"""Muon's orthogonalisation (Jordan et al. 2024): matrices with all their singular values made about equal."""

import math

from torch import Tensor

from kernels.dispatch import Operation
from kernels.operators import define
from kernels.orthogonalize import cpu, reference

__all__ = ["orthogonalize"]


def orthogonalize(matrices: Tensor) -> Tensor:
    """About U V^T of each matrix U S V^T `[..., rows, columns]`, by five quintic Newton-Schulz steps.

    A floating dtype, which the steps are made in; a contiguous result of the same shape and dtype, which
    carries no gradient. Singular values below about 1e-2 of the norm end below 1, a matrix of zeros stays
    one, and nothing of a matrix with an infinity or NaN is finite after. With the compiled code a matrix's
    bits depend on itself alone. ValueError for another dtype or fewer than two axes.
    """
    if matrices.ndim < 2 or not matrices.dtype.is_floating_point:
        raise ValueError(
            "orthogonalize: matrices must be of a floating-point dtype and [..., rows, columns], "
            f"got {matrices.dtype} {list(matrices.shape)}"
        )
    return _orthogonalize(matrices.detach())


def _flops(matrices: tuple[int, ...], **_: object) -> int:
    *stack, rows, columns = matrices
    short, long = sorted((rows, columns))
    return math.prod(stack) * reference.STEPS * 2 * (2 * short * short * long + short**3)


_orthogonalize = define(
    "orthogonalize(Tensor matrices) -> Tensor",
    Operation("orthogonalize", torch=reference.orthogonalize, native=cpu.orthogonalize),
    fake=lambda matrices: matrices.new_empty(matrices.shape),
    flops=_flops,
)
