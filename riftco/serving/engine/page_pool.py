"""Which physical pages are in use, by how many page tables, and what the others still hold.

A page is free when no page table names it. A full page may be published under a key, the hash of all that
determines its contents; a free published page keeps them, and is the last to be taken: the one released
longest ago first.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PagePool:
    """Reference counts and keys of `page_count` pages, numbered from 0. Not safe between threads."""

    def __init__(self, page_count: int) -> None:
        self.page_count = page_count
        self.counts = [0] * page_count
        self._blank = list(reversed(range(page_count)))  # a stack that yields 0, 1, 2, ... at first
        self._kept: OrderedDict[int, None] = OrderedDict()  # free and published
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    @property
    def free_count(self) -> int:
        """Pages that can be taken."""
        return len(self._blank) + len(self._kept)

    @property
    def kept_count(self) -> int:
        """Free pages that still hold published tokens."""
        return len(self._kept)

    def take(self, count: int) -> list[int]:
        """`count` free pages, each now used once; RuntimeError, and no change, when there are too few."""
        if count > self.free_count:
            raise RuntimeError(
                f"the page pool is exhausted: {count} pages were asked for, {self.free_count} of "
                f"{self.page_count} are free"
            )
        pages = []
        for _ in range(count):
            page = self._blank.pop() if self._blank else self._evict()
            self.counts[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Take one use off each page, in this order. ValueError, and no change, if one has too few."""
        if any(
            not 0 <= page < self.page_count or self.counts[page] < pages.count(page) for page in set(pages)
        ):
            raise ValueError(f"pages {list(pages)} are not all in use as often as they are released")
        for page in pages:
            self.counts[page] -= 1
            if not self.counts[page]:
                if page in self._keys:
                    self._kept[page] = None
                else:
                    self._blank.append(page)

    def publish(self, page: int, key: bytes) -> None:
        """Let a full page in use be found under a key; the first page published under it stays."""
        if not self.counts[page] or page in self._keys:
            raise ValueError(f"page {page} is free or already published")
        if key not in self._pages:
            self._pages[key], self._keys[page] = page, key

    def is_published(self, page: int) -> bool:
        return page in self._keys

    def share(self, key: bytes) -> int | None:
        """The page published under a key, used once more; None if there is none."""
        page = self._pages.get(key)
        if page is not None:
            self._kept.pop(page, None)
            self.counts[page] += 1
        return page

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        del self._pages[self._keys.pop(page)]
        return page
