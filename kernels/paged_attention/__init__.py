"""Attention of sequences' newest tokens over keys and values that live in pages."""

from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import Operation
from kernels.operators import define
from kernels.paged_attention import cpu, reference

__all__ = ["paged_attention"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def paged_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor | int,
    *,
    counts: Tensor | None = None,
) -> Tensor:
    """Attend from the newest tokens of S sequences; each sees itself and everything before it.

    q is `[S, H, n, d]`, pages are `[P, H, page, d]`, of one dtype (float32, bfloat16, computed in float32,
    or float64) and device. Logical page i of sequence s lies at physical page `page_table[s, i]`, int32 or
    int64 `[S, max_pages]`; sequences may share pages. Sequence s has `lengths[s]` visible tokens (int64
    `[S]`), of which its queries are the last n; with `counts` (int64 `[S]`) its queries are the first
    counts[s] of q's and the other rows give 0. One sequence may be given as a table `[pages]` of exactly
    its pages and an int length. Returns `[S, H, n, d]`; not differentiable.

    Pages beyond a length are never read into a result. The native and the Triton implementation compute each
    (sequence, head, query) alone, in blocks of logical positions from 0 on: the bits of its result depend
    neither on the other sequences, nor on whether tokens come one by one or together, nor on the number of
    threads, nor on the page size. ValueError for what does not fit; on a GPU the values of table, lengths and
    counts are not looked at, and what they name outside the pages counts as unseen.
    """
    _check_tensors(q, key_pages, value_pages)
    if isinstance(lengths, int):
        page_table, lengths = _one_sequence(page_table, lengths, key_pages.shape[2])
    _check_integers(q, page_table, lengths, counts)
    return _paged_attention(q, key_pages, value_pages, page_table, lengths, counts)


def _check_tensors(q: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
    if q.ndim != 4 or key_pages.ndim != 4:
        raise ValueError(
            "q must be [S, H, n, d] and pages [P, H, page, d], "
            f"got {list(q.shape)} and {list(key_pages.shape)}"
        )
    if q.dtype not in _DTYPES:
        raise ValueError(f"q must be float32, bfloat16 or float64, got {q.dtype}; convert q and the pages")
    expected = (key_pages.shape[0], q.shape[1], key_pages.shape[2], q.shape[3])
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        if pages.shape != expected or pages.dtype != q.dtype or pages.device != q.device:
            raise ValueError(
                f"{name} must be {q.dtype} {list(expected)} on {q.device} as q is, "
                f"got {pages.dtype} {list(pages.shape)} on {pages.device}"
            )
    if not key_pages.shape[2] or not q.shape[3]:
        raise ValueError(f"pages must hold at least one token and one number each, got {list(expected)}")


def _check_integers(q: Tensor, page_table: Tensor, lengths: Tensor, counts: Tensor | None) -> None:
    sequences = q.shape[0]
    if page_table.ndim != 2 or page_table.shape[0] != sequences or page_table.dtype not in _INTEGERS:
        raise ValueError(
            f"page_table must be int32 or int64 [{sequences}, max_pages], "
            f"got {page_table.dtype} {list(page_table.shape)}"
        )
    for name, x in (("lengths", lengths), ("counts", counts)):
        if x is not None and (x.shape != (sequences,) or x.dtype != torch.int64):
            raise ValueError(f"{name} must be int64 [{sequences}], got {x.dtype} {list(x.shape)}")
    for name, x in (("page_table", page_table), ("lengths", lengths), ("counts", counts)):
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} must be on {q.device} as q is, got {x.device}")


def _one_sequence(page_table: Tensor, length: int, page_size: int) -> tuple[Tensor, Tensor]:
    pages = -(-length // page_size)
    if page_table.shape != (pages,):
        raise ValueError(f"{length} tokens need {pages} pages, got {list(page_table.shape)}")
    return page_table[None], torch.tensor([length], device=page_table.device)


def _triton(*arguments: Any) -> Any:
    from kernels.paged_attention.triton_forward import attend

    return attend(*arguments)


_attend = Operation(
    "paged_attention",
    torch=reference.attend,
    native=cpu.attend if cpu.built else None,
    triton=_triton,
)


def _fake(q: Tensor, *_: Any) -> Tensor:
    return reference.empty_heads(q)


_paged_attention = define(
    "paged_attention(Tensor q, Tensor key_pages, Tensor value_pages, Tensor page_table, Tensor lengths, "
    "Tensor? counts) -> Tensor",
    _attend,
    fake=_fake,
)
