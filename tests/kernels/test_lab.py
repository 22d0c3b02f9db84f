"""The lab itself: bf16 is right when interpreted, memory errors are seen, compiling leaves no trace."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.lab import TARGETS, KernelMemoryError, compile_for, interpret, resources, sanitize


@triton.jit
def _axpy_kernel(x_ptr, y_ptr, out_ptr, count, step: tl.int64, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * step + tl.arange(0, BLOCK)
    mask = i < count
    x = tl.load(x_ptr + i, mask=mask, other=0.0)
    y = tl.load(y_ptr + i, mask=mask, other=0.0)
    tl.store(out_ptr + i, x * FACTOR + y, mask=mask)


@triton.jit
def _narrow_index_kernel(out_ptr, step):
    tl.store(out_ptr + (tl.program_id(0) + 1) * step * 0, 1.0)


def axpy(x, y, *, count=None, block=64, step=None):
    out = torch.full_like(x, 7.0)
    programs = triton.cdiv(x.numel(), block)
    _axpy_kernel[(programs,)](x, y, out, count or x.numel(), step or block, FACTOR=3.0, BLOCK=block)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interpreted_arithmetic_is_that_of_the_dtype(dtype):
    x, y = (torch.randn(100, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    with interpret():
        actual = axpy(x, y)
    assert torch.equal(actual, x * 3.0 + y)


def test_sound_kernels_pass_the_sanitizer():
    with sanitize():
        assert torch.equal(axpy(torch.ones(100), torch.ones(100)), torch.full((100,), 4.0))


def test_an_access_out_of_bounds_is_seen():
    with sanitize(), pytest.raises(KernelMemoryError, match="out-of-bounds load"):
        axpy(torch.ones(100), torch.ones(100), count=128)


def test_two_programs_storing_to_one_address_are_seen():
    with sanitize(), pytest.raises(KernelMemoryError, match="without atomics"):
        axpy(torch.ones(100), torch.ones(100), step=32)


def test_a_32_bit_overflow_is_seen():
    with sanitize(), pytest.raises(Exception, match="overflow"):
        _narrow_index_kernel[(2,)](torch.ones(1), 2**31 - 1)


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_is_compiled_for_a_gpu_that_is_not_there(target):
    with compile_for(TARGETS[target]) as compiled:
        axpy(torch.empty(100, device="meta"), torch.empty(100, device="meta"))
    ((name, kernel),) = compiled
    assert name == "_axpy_kernel"
    used = resources(kernel)
    assert used["registers"] > 0
    assert used["spills"] == used["matrix"] == 0


def test_compiling_works_after_interpreting():
    with interpret():
        axpy(torch.ones(4), torch.ones(4))
    with compile_for(TARGETS["sm_90"]) as compiled:
        axpy(torch.empty(5, device="meta"), torch.empty(5, device="meta"), block=32)
    assert compiled
