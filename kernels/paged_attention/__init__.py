"""Attention of a request's newest tokens over keys and values that live in pages."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["paged_attention"]


def paged_attention(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, page_table: Tensor, length: int
) -> Tensor:
    """Attend from the last n of `length` visible tokens; each sees itself and everything before it.

    q is `[1, H, n, d]`, pages are `[P, H, page, d]`, `page_table` is int64 `[ceil(length / page)]`: logical
    page i lies at physical page `page_table[i]`. Returns `[1, H, n, d]`. What lies in the pages beyond
    `length` is never read into the result. ValueError for a page table or length that does not fit.
    """
    count, page_size = q.shape[2], key_pages.shape[2]
    if not count <= length:
        raise ValueError(f"{count} queries cannot be the last of {length} visible tokens")
    if page_table.numel() != -(-length // page_size):
        raise ValueError(f"{length} tokens need {-(-length // page_size)} pages, got {page_table.numel()}")
    if page_table.numel() and not 0 <= int(page_table.min()) <= int(page_table.max()) < key_pages.shape[0]:
        raise ValueError(
            f"page table {page_table.tolist()} names a page outside 0...{key_pages.shape[0] - 1}"
        )
    k, v = (_gather(pages, page_table, length) for pages in (key_pages, value_pages))
    visible = None
    if count > 1:  # query i sits at position length - count + i
        visible = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
    return scaled_dot_product_attention(q, k, v, attn_mask=visible)


def _gather(pages: Tensor, page_table: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a page table in order, `[1, H, length, d]`."""
    return pages[page_table].transpose(0, 1).flatten(1, 2)[None, :, :length]
