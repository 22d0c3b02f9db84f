"""Paged attention by `native/paged_attention.cpp`: float32 and bfloat16, any strides."""

from typing import Any

import torch
from torch import Tensor

from kernels.native import Integer, Pointer, function, pointer
from kernels.paged_attention.reference import empty_heads, refuse_misfits

_native = function("riftco_paged_attention", *[Pointer] * 6, Integer, Pointer, Integer)

built = _native is not None


def attend(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    counts: Tensor | None,
) -> Any:
    """As `paged_attention`; NotImplemented for another dtype than float32 and bfloat16."""
    if q.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    out = empty_heads(q)
    tensors = [x if x.stride(3) == 1 else x.contiguous() for x in (q, key_pages, value_pages)] + [out]
    table = page_table.to(torch.int64).contiguous()
    lengths = lengths.contiguous()
    counts = None if counts is None else counts.contiguous()
    threads = torch.get_num_threads()
    sizes = (*q.shape, key_pages.shape[2], table.shape[1], key_pages.shape[0])
    scratch = q.new_empty(threads * 16 * (-(-q.shape[3] // 16) * 16), dtype=torch.float32)
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    misfit = _native(  # type: ignore[misc]
        (Integer * len(sizes))(*sizes),
        (Pointer * len(tensors))(*(x.data_ptr() for x in tensors)),
        pointer(table),
        pointer(lengths),
        pointer(counts),
        (Integer * len(strides))(*strides),
        int(q.dtype == torch.bfloat16),
        pointer(scratch),
        threads,
    )
    if misfit:
        refuse_misfits(q, key_pages, table, lengths, counts)
    return out
