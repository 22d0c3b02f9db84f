"""The page pool: sizes, the exact order of its stack, and leases that several threads fight over."""

from threading import Thread

import pytest

from riftco.serving import PagedKvCachePool
from tests.riftco.serving.models import tiny_config


def pool(**options: int) -> PagedKvCachePool:
    return PagedKvCachePool(tiny_config(context=40), **options)


@pytest.mark.parametrize(("block_size", "pages"), [(1, 40), (7, 6), (16, 3), (40, 1), (41, 1), (1000, 1)])
def test_the_default_is_exactly_one_full_context(block_size: int, pages: int) -> None:
    made = pool(block_size=block_size)
    assert made.block_count == made.blocks_per_full_cache == made.free_block_count == pages
    assert made.leased_block_count == 0
    assert made.pages.keys[0].shape == made.pages.values[1].shape == (pages, 2, block_size, 4)
    assert not made.pages.keys[0].any()


def test_a_pool_that_cannot_hold_one_context_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold one full context of 40; use at least 3"):
        pool(block_size=16, block_count=2)
    assert pool(block_size=16, block_count=4).block_count == 4


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"block_size": 0}, ValueError),
        ({"block_size": True}, TypeError),
        ({"block_count": -1}, ValueError),
        ({"block_count": 2.0}, TypeError),
    ],
)
def test_sizes_must_be_integers_in_range(options: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        pool(**options)


def test_pages_come_in_ascending_order_and_the_last_returned_first() -> None:
    stack = pool(block_size=8)
    assert stack.lease(4) == [0, 1, 2, 3]
    stack.release([1, 3, 0])
    assert (stack.free_block_count, stack.leased_block_count) == (4, 1)
    assert stack.lease(4) == [0, 3, 1, 4]


def test_a_lease_is_all_or_nothing() -> None:
    stack = pool(block_size=16)
    stack.lease(2)
    with pytest.raises(RuntimeError, match="pool is exhausted: 2 pages were asked for, 1 of 3 are free"):
        stack.lease(2)
    assert stack.lease(1) == [2]


@pytest.mark.parametrize("pages", [[2], [0, 0], [7], [0, 2]])
def test_returning_what_is_not_leased_is_an_error_and_changes_nothing(pages: list[int]) -> None:
    stack = pool(block_size=16)
    stack.lease(2)
    with pytest.raises(ValueError, match="not all in use"):
        stack.release(pages)
    assert (stack.free_block_count, stack.leased_block_count) == (1, 2)


def test_threads_never_hold_the_same_page() -> None:
    stack = pool(block_size=1)
    doubles: list[int] = []
    owner: dict[int, int] = {}

    def work(name: int) -> None:
        for _ in range(300):
            pages = stack.lease(5)
            for page in pages:
                if owner.setdefault(page, name) != name:
                    doubles.append(page)
            for page in pages:
                owner.pop(page, None)
            stack.release(pages)

    threads = [Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not doubles
    assert stack.free_block_count == 40
