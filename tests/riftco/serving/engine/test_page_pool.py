"""The engine's page pool: counts, keys and the order of eviction, against a model of a few lines."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from riftco.serving.engine.page_pool import PagePool

KEYS = [bytes([letter]) for letter in b"abcdef"]


def test_pages_come_in_ascending_order_and_the_last_returned_first() -> None:
    pool = PagePool(6)
    assert pool.take(4) == [0, 1, 2, 3]
    pool.release([1, 3, 0])
    assert pool.take(4) == [0, 3, 1, 4]
    assert pool.free_count == 1


def test_taking_is_all_or_nothing() -> None:
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(RuntimeError, match="exhausted: 2 pages were asked for, 1 of 3 are free"):
        pool.take(2)
    assert pool.take(1) == [2]
    assert pool.take(0) == []


@pytest.mark.parametrize("pages", [[2], [0, 0], [0, 7], [-1], [0, 2]])
def test_releasing_what_is_not_in_use_is_an_error_and_changes_nothing(pages: list[int]) -> None:
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(ValueError, match="not all in use"):
        pool.release(pages)
    assert pool.counts == [1, 1, 0]


def test_a_page_shared_twice_is_released_twice() -> None:
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.publish(page, b"key")
    assert pool.share(b"key") == page
    pool.release([page, page])
    assert (pool.free_count, pool.kept_count) == (2, 1)


def test_what_is_free_and_published_is_taken_last_and_the_longest_unused_first() -> None:
    pool = PagePool(4)
    for page, key in zip(pool.take(3), KEYS, strict=False):
        pool.publish(page, key)
    pool.release([2, 0, 1])
    assert pool.share(KEYS[2]) == 2  # used again, so it is the newest now
    pool.release([2])
    assert pool.take(2) == [3, 0]
    assert [pool.share(key) for key in KEYS[:3]] == [None, 1, 2]


def test_the_first_page_published_under_a_key_stays() -> None:
    pool = PagePool(2)
    pool.take(2)
    pool.publish(0, b"key")
    pool.publish(1, b"key")
    assert (pool.is_published(0), pool.is_published(1)) == (True, False)
    pool.release([0, 1])
    assert pool.kept_count == 1
    assert pool.take(2) == [1, 0]


@pytest.mark.parametrize("page", [0, 1])
def test_only_a_page_in_use_is_published_and_only_once(page: int) -> None:
    pool = PagePool(2)
    pool.take(1)
    pool.publish(0, b"key")
    with pytest.raises(ValueError, match=f"page {page} is free or already published"):
        pool.publish(page, b"other")


class Pool(RuleBasedStateMachine):
    """Any calls in any order, beside lists that say what must come of them."""

    @initialize(page_count=st.integers(1, 6))
    def make(self, page_count: int) -> None:
        self.pool = PagePool(page_count)
        self.used: list[int] = []  # once for each use
        self.kept: list[int] = []  # longest unused first
        self.keys: dict[int, bytes] = {}

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        free = self.pool.page_count - len(set(self.used))
        count = data.draw(st.integers(0, free))
        blank = free - len(self.kept)
        pages = self.pool.take(count)
        assert set(pages).isdisjoint(self.used)
        evicted = max(0, count - blank)
        assert pages[len(pages) - evicted :] == self.kept[:evicted]
        for page in self.kept[:evicted]:
            del self.keys[page]
        del self.kept[:evicted]
        self.used += pages
        assert len(set(pages)) == count
        assert set(pages).isdisjoint(self.kept)
        with pytest.raises(RuntimeError):
            self.pool.take(free - count + 1)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.permutations(self.used))
        pages = pages[: data.draw(st.integers(0, len(pages)))]
        self.pool.release(pages)
        for page in pages:
            self.used.remove(page)
            if page not in self.used and page in self.keys:
                self.kept.append(page)

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        unpublished = sorted(set(self.used) - self.keys.keys())
        if unpublished:
            page = data.draw(st.sampled_from(unpublished))
            self.pool.publish(page, key)
            if key not in self.keys.values():
                self.keys[page] = key

    @rule(key=st.sampled_from(KEYS))
    def share(self, key: bytes) -> None:
        page = self.pool.share(key)
        assert page == next((page for page, known in self.keys.items() if known == key), None)
        if page is not None:
            self.used.append(page)
            if page in self.kept:
                self.kept.remove(page)

    @invariant()
    def counts_are_those_of_the_uses(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.counts == [self.used.count(page) for page in range(self.pool.page_count)]
            assert self.pool.free_count == self.pool.counts.count(0)
            assert self.pool.kept_count == len(self.kept)
            assert {
                page for page in range(self.pool.page_count) if self.pool.is_published(page)
            } == self.keys.keys()


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
