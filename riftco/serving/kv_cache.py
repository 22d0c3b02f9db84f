"""A request's keys and values as a transaction: begin, append every layer once, commit or abort.

Logical page i of a request lies at physical page `page_table[i]`. Tokens become visible (`size`) only at
commit, so that a failed forward leaves the cache as it was. H heads, d head width, n tokens begun at once.

Invariants: the table has exactly ceil((size + n) / page_size) pages (the contiguous cache always has its one
page), no page twice; size <= capacity; between transactions n = 0 and no page is pending.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from artifacts import ModelConfig
from kernels import kv_write, paged_attention
from riftco.backends import BackendName
from riftco.serving.page_pool import KvPages, PagedKvCachePool


@dataclass(slots=True)
class _Transaction:
    """Tokens begun and not yet committed: where they go and which layers have written them."""

    count: int
    pending_pages: int
    page_table: Tensor
    slots: Tensor
    written: list[bool]


class RequestKvCache:
    """What both caches share: page table, size and the transaction. Use one of the two subclasses."""

    def __init__(self, config: ModelConfig, pages: KvPages, page_table: list[int]) -> None:
        self.capacity = config.maximum_context
        self._pages = pages
        self._page_size = pages.keys[0].shape[2]
        self._page_table = page_table
        self._size = 0
        self._transaction: _Transaction | None = None

    @property
    def size(self) -> int:
        """Committed tokens."""
        return self._size

    @property
    def page_table(self) -> tuple[int, ...]:
        """Physical pages in logical order."""
        return tuple(self._page_table)

    def begin(self, count: int = 1) -> None:
        """Start appending `count` tokens, leasing the pages they need; all or nothing.

        RuntimeError when tokens are already begun, the capacity is exhausted or the pool is.
        """
        if self._transaction is not None:
            raise RuntimeError("tokens are already being appended; commit or abort them first")
        if count < 1:
            raise ValueError(f"begin needs at least one token, got {count}")
        end = self._size + count
        if end > self.capacity:
            raise RuntimeError(
                f"the cache's capacity is exhausted: {self._size} of {self.capacity} tokens are used and "
                f"{count} more do not fit; reset it and replay the newest tokens"
            )
        leased = self._lease(-(-end // self._page_size) - len(self._page_table))
        self._page_table.extend(leased)
        try:
            self._transaction = self._plan(end, count, len(leased))
        except BaseException:
            self._return_newest(len(leased))
            raise

    def append_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store one layer's k and v of the begun tokens and attend from q; all are float32 `[1, H, n, d]`.

        Query i sees the committed tokens and the begun ones up to itself. RuntimeError without begin or for
        a layer written twice, IndexError for a layer the cache lacks, ValueError for another shape or device.
        """
        transaction = self._transaction
        if transaction is None:
            raise RuntimeError("append_and_attend needs begin first")
        if not 0 <= layer < len(transaction.written):
            raise IndexError(f"layer {layer} is outside the cache's {len(transaction.written)} layers")
        if transaction.written[layer]:
            raise RuntimeError(f"layer {layer} has already written these tokens")
        keys, values = self._pages.keys[layer], self._pages.values[layer]
        _require_fit({"q": q, "k": k, "v": v}, keys, transaction.count)
        kv_write(keys, values, k[0].transpose(0, 1), v[0].transpose(0, 1), transaction.slots)
        transaction.written[layer] = True
        return paged_attention(q, keys, values, transaction.page_table, self._size + transaction.count)

    def commit(self) -> None:
        """Make the begun tokens visible; RuntimeError unless begun and written by every layer."""
        if self._transaction is None:
            raise RuntimeError("commit needs begin first")
        missing = [layer for layer, written in enumerate(self._transaction.written) if not written]
        if missing:
            raise RuntimeError(f"layers {missing} have not written the begun tokens; abort them")
        self._size += self._transaction.count
        self._transaction = None

    def abort(self) -> None:
        """Forget the begun tokens and give back their pages; the size stays. Without begin, nothing."""
        if self._transaction is not None:
            pending = self._transaction.pending_pages
            self._transaction = None
            self._return_newest(pending)

    def reset(self) -> None:
        """Abort, return every page in table order, size 0."""
        self.abort()
        self._release_table()
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()

    def _plan(self, end: int, count: int, pending_pages: int) -> _Transaction:
        device = self._pages.keys[0].device
        page_table = torch.tensor(self._page_table, device=device)
        positions = torch.arange(end - count, end, device=device)
        return _Transaction(
            count,
            pending_pages,
            page_table,
            page_table[positions // self._page_size] * self._page_size + positions % self._page_size,
            [False] * len(self._pages.keys),
        )

    def _return_newest(self, count: int) -> None:
        """Undo a lease: newest page first, which leaves the pool's stack exactly as it was."""
        pages = [self._page_table.pop() for _ in range(count)]
        self._release(pages)

    def _lease(self, count: int) -> list[int]:
        raise NotImplementedError

    def _release(self, pages: Sequence[int]) -> None:
        raise NotImplementedError

    def _release_table(self) -> None:
        raise NotImplementedError


class PagedKvCache(RequestKvCache):
    """A request cache that leases pages as it grows. `reset` (or leaving its `with`) returns them."""

    def __init__(self, pool: PagedKvCachePool) -> None:
        super().__init__(pool.config, pool.pages, [])
        self._pool = pool

    def _lease(self, count: int) -> list[int]:
        return self._pool.lease(count)

    def _release(self, pages: Sequence[int]) -> None:
        self._pool.release(pages)

    def _release_table(self) -> None:
        pages, self._page_table = self._page_table, []
        self._pool.release(pages)


class ContiguousKvCache(RequestKvCache):
    """A request cache over one fixed page of a full context; it leases nothing."""

    def __init__(self, config: ModelConfig, *, backend: BackendName = "cpu") -> None:
        super().__init__(config, KvPages.zeros(config, 1, config.maximum_context, backend), [0])

    def _lease(self, count: int) -> list[int]:
        return []

    def _release(self, pages: Sequence[int]) -> None:
        pass

    def _release_table(self) -> None:
        pass


def _require_fit(tensors: dict[str, Tensor], pages: Tensor, count: int) -> None:
    """ValueError unless each is `[1, H, n, d]`, of the dtype and device of the pages `[P, H, page, d]`."""
    expected = (1, pages.shape[1], count, pages.shape[3])
    for name, tensor in tensors.items():
        if tensor.shape != expected or tensor.dtype != pages.dtype or tensor.device != pages.device:
            raise ValueError(
                f"{name} must be {pages.dtype} {list(expected)} on {pages.device}, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
