"""One test body for every implementation, and tensors that lie among NaN."""

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch

from kernels.dispatch import use
from kernels.flash_attention import cpu
from kernels.native import library
from kernels.operands import AttentionOperands
from tests.kernels.lab import sanitize

HAS_BF16 = cpu.built and library().riftco_lanes() == 16 and torch.cpu._is_avx512_bf16_supported()
IMPLEMENTATIONS = ("torch", "native", "half", "triton")
_operands: AttentionOperands = "full"


def operands() -> AttentionOperands:
    """Those of what runs: "half" is the native code with them, where the CPU has them."""
    return _operands


@contextlib.contextmanager
def running(implementation: str) -> Iterator[None]:
    """Run one implementation, Triton interpreted and watched; what is allocated holds NaN."""
    global _operands
    half = implementation == "half"
    if half and not HAS_BF16:
        pytest.skip("this CPU does not multiply bf16")
    if (half or implementation == "native") and not cpu.built:
        pytest.skip("the native code is not built")
    with contextlib.ExitStack() as stack:
        if implementation == "triton":
            stack.enter_context(sanitize())
        stack.enter_context(use("native" if half else implementation))
        _operands = "half" if half else "full"
        stack.callback(_forget)
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True)  # fills uninitialised memory
        yield


def _forget() -> None:
    global _operands
    _operands = "full"


def among_nan(x: torch.Tensor) -> torch.Tensor:
    """The same tensor inside a larger one that holds NaN, before, between and after its rows."""
    room = torch.full([size + 2 for size in x.shape], math.nan, dtype=x.dtype)
    inside = room[tuple(slice(1, -1) for _ in x.shape)]
    return inside.copy_(x)
