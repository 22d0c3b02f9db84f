"""Paged attention in torch: each sequence's pages gathered, then the definition. And what it refuses."""

from torch import Tensor

from kernels.flash_attention import reference


def attend(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    counts: Tensor | None,
) -> Tensor:
    """As `paged_attention`."""
    refuse_misfits(q, key_pages, page_table, lengths, counts)
    out = empty_heads(q).zero_()
    for s, length in enumerate(lengths.tolist()):
        count = q.shape[2] if counts is None else int(counts[s])
        k, v = (_gather(pages, page_table[s], length) for pages in (key_pages, value_pages))
        out[s : s + 1, :, :count] = reference.forward(q[s : s + 1, :, :count], k, v, None)[0]
    return out


def empty_heads(q: Tensor) -> Tensor:
    """`[S, H, n, d]` in memory as `[S, n, H, d]`, so that merging the heads afterwards copies nothing."""
    return reference.empty_heads(q, q.shape)


def refuse_misfits(
    q: Tensor, key_pages: Tensor, page_table: Tensor, lengths: Tensor, counts: Tensor | None
) -> None:
    """ValueError that names the first sequence whose table, length or count does not fit."""
    page_count, page_size = key_pages.shape[0], key_pages.shape[2]
    for s, length in enumerate(lengths.tolist()):
        count = q.shape[2] if counts is None else int(counts[s])
        if not 0 <= count <= q.shape[2]:
            raise ValueError(f"sequence {s}: count must be 0 to {q.shape[2]}, as many as q has, got {count}")
        if count > length:
            raise ValueError(
                f"sequence {s}: {count} queries cannot be the last of {length} visible tokens; "
                "lengths include the queries' own tokens"
            )
        used = -(-length // page_size)
        if used > page_table.shape[1]:
            raise ValueError(
                f"sequence {s}: {length} tokens need {used} pages, the table has {page_table.shape[1]}"
            )
        outside = [page for page in page_table[s, :used].tolist() if not 0 <= page < page_count]
        if outside:
            raise ValueError(f"sequence {s}: its table names page {outside[0]} outside 0...{page_count - 1}")


def _gather(pages: Tensor, page_table: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a page table in order, `[1, H, length, d]`."""
    used = page_table[: -(-length // pages.shape[2])]
    return pages[used].transpose(0, 1).flatten(1, 2)[None, :, :length]
