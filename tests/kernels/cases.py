"""What tests of several operations share: implementations to run under, layouts of tensors, error bounds."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from kernels.dispatch import use
from tests.kernels.lab import sanitize

IMPLEMENTATIONS = ("torch", "native", "triton")
DTYPES = (torch.float32, torch.bfloat16)
GUARD = 0 if "ASAN_OPTIONS" in os.environ else 32  # AddressSanitizer has its own, which ours would hide


@contextmanager
def running(name: str) -> Iterator[None]:
    """Run operations by one implementation, Triton's interpreted and watched; fresh memory holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with use(name), sanitize() if name == "triton" else nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normal values inside storage that is NaN on both sides."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return guarded(values.to(dtype))


def guarded(x: Tensor) -> Tensor:
    """The same values inside storage that is NaN on both sides."""
    storage = torch.full((x.numel() + 2 * GUARD,), torch.nan, dtype=x.dtype)
    return storage[GUARD : GUARD + x.numel()].view(x.shape).copy_(x)


def permuted(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def every_other(x: Tensor) -> Tensor:
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def expanded(x: Tensor) -> Tensor:
    """Every row the first one, by a stride of 0."""
    return x[:1].expand(x.shape)


def concatenated(x: Tensor) -> Tensor:
    """The middle of a wider matrix."""
    side = torch.full_like(x, torch.nan)
    return torch.cat([side, x, side], -1)[..., x.shape[-1] : 2 * x.shape[-1]]


def virtual(count: int, dtype: torch.dtype) -> Tensor:
    """Memory of which only the pages that are touched will exist."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        return torch.empty(count, dtype=dtype)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled


def far_apart(x: Tensor) -> Tensor:
    """Two rows 2^31 elements apart."""
    stride = 2**31 + 64
    return virtual(stride + x.shape[1], x.dtype).as_strided(x.shape, (stride, 1)).copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "permuted": permuted,
    "every other": every_other,
    "expanded": expanded,
    "concatenated": concatenated,
}


def leaves(*tensors: Tensor | None, dtype: torch.dtype | None = None) -> list[Tensor | None]:
    """Detached tensors that ask for gradients, as they lie in memory or in another dtype."""
    return [x if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]


def bits(x: Tensor) -> Tensor:
    """As integers, so that NaN equals itself."""
    return x.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_as_exact_as(actual: Tensor, peer: Tensor, exact: Tensor, factor: float, what: str) -> None:
    """The error is at most `factor` times that of torch's own operation, plus one rounding of the largest
    value."""
    actual, peer, exact = actual.detach(), peer.detach(), exact.detach()
    assert actual.shape == exact.shape, what
    if not exact.numel():
        return
    epsilon = torch.finfo(actual.dtype).eps * float(exact.abs().max())
    error, allowed = ((y.double() - exact).abs().max() for y in (actual, peer))
    assert float(error) <= factor * float(allowed) + epsilon, (
        f"{what}: {float(error)}, torch {float(allowed)}"
    )
