"""Bugs for `test_planted_bugs.py`."""

import pytest

from kernels.kv_write import triton_write
from tests.kernels.kv_write.test_kv_write import (
    test_layouts_do_not_matter,
    test_nothing_around_the_slots_is_touched,
    test_offsets_beyond_32_bits,
    test_slots_outside_are_skipped_on_a_gpu,
    test_tokens_larger_than_a_block,
)
from tests.kernels.planting import Patch


def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in a token, slots that are skipped, offsets beyond 32 bits, layouts of their own."""
    monkeypatch.setattr(triton_write, "_BLOCK", 16)
    test_tokens_larger_than_a_block("triton", 16)
    for slot in (-2, 35, 2**40):
        test_slots_outside_are_skipped_on_a_gpu(slot)
    test_offsets_beyond_32_bits("triton")
    test_layouts_do_not_matter("triton")
    test_nothing_around_the_slots_is_touched("triton")


BUGS = (
    ("slot < 0", "slot < -1"),
    ("slot >= page_count", "slot > page_count"),
    ("number < heads * width", "number <= heads * width"),
    ("slot // page_size, slot % page_size", "slot % page_size, slot // page_size"),
    ("% blocks * BLOCK", "% blocks * width"),
    ("h * stride_kph", "h * stride_kh"),
    ("offset * stride_vpt", "offset * stride_kpt"),
    ("token * stride_vt", "token * stride_kt"),
    ("tl.store(to_value, value", "tl.store(to_value, key"),
    ("page * stride_vpp", "(page * stride_vpp).to(tl.int32)"),
    ("tl.cdiv(heads * width, BLOCK)", "heads * width // BLOCK + 1"),
    ("(slot < 0) | ", ""),
    (" | (slot >= page_count * page_size)", ""),
    ("slot >= page_count * page_size", "slot >= page_count"),
    ("number // width", "number // heads"),
    ("slots_ptr + token", "slots_ptr + tl.program_id(0)"),
    ("d * stride_kpd", "d"),
    ("d * stride_vd", "d * stride_kd"),
    ("tl.store(to_key, key, mask=mask)", "tl.store(to_key, key)"),
)

PATCHES = (Patch(triton_write, "_kv_write_kernel", checks, BUGS),)
