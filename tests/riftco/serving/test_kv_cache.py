"""Request caches: every sequence of transactions, from several requests over one pool, against a plain list.

The oracle knows each request's own keys and values and computes attention densely in float64, so a page that
leaks from another request, an earlier owner or a poisoned free page changes the result and is seen.
"""

import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from torch import Tensor

from artifacts import ModelConfig
from riftco.serving import ContiguousKvCache, PagedKvCache, PagedKvCachePool
from riftco.serving.kv_cache import RequestKvCache

LAYERS, HEADS, WIDTH, CONTEXT, PAGE, PAGES = 2, 2, 3, 10, 3, 7
CONFIG = ModelConfig(5, CONTEXT, HEADS * WIDTH, HEADS, LAYERS, 4)


def random_heads(count: int, seed: int) -> Tensor:
    return torch.randn(1, HEADS, count, WIDTH, generator=torch.Generator().manual_seed(seed))


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last n queries, in float64, query by query."""
    rows = []
    length, count = k.shape[2], q.shape[2]
    for i in range(count):
        seen = length - count + i + 1
        scores = (q[:, :, i : i + 1].double() @ k[:, :, :seen].double().mT) / math.sqrt(WIDTH)
        rows.append(scores.softmax(-1) @ v[:, :, :seen].double())
    return torch.cat(rows, 2).float()


class Request:
    """A cache beside what it must contain."""

    def __init__(self, cache: RequestKvCache) -> None:
        self.cache = cache
        self.keys: list[Tensor] = [torch.empty(1, HEADS, 0, WIDTH) for _ in range(LAYERS)]
        self.values = list(self.keys)
        self.size = 0
        self.begun = 0
        self.written = 0
        self.pending_pages = 0
        self.pages: list[int] = [] if isinstance(cache, PagedKvCache) else [0]


class RequestsOverOnePool(RuleBasedStateMachine):
    """Three requests on a shared pool of two and a third contexts, and one contiguous request."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagedKvCachePool(CONFIG, block_size=PAGE, block_count=PAGES)
        self.stack = list(range(PAGES))[::-1]
        self.all: list[Request] = []
        self.seed = 0

    @rule(target=requests)
    def open(self) -> Request:
        paged = len(self.all) % 4 != 3
        cache = PagedKvCache(self.pool) if paged else ContiguousKvCache(CONFIG)
        self.all.append(Request(cache))
        return self.all[-1]

    @rule(request=requests, count=st.integers(1, CONTEXT + 1))
    def begin(self, request: Request, count: int) -> None:
        paged = isinstance(request.cache, PagedKvCache)
        end = request.size + count
        needed = max(0, math.ceil(end / PAGE) - len(request.pages)) if paged else 0
        if request.begun:
            self.refused(request, count, "already being appended")
        elif end > CONTEXT:
            self.refused(request, count, "capacity is exhausted")
        elif needed > len(self.stack):
            self.refused(request, count, "pool is exhausted")
        else:
            request.cache.begin(count)
            request.begun, request.written, request.pending_pages = count, 0, needed
            request.pages += [self.stack.pop() for _ in range(needed)]

    def refused(self, request: Request, count: int, why: str) -> None:
        with pytest.raises(RuntimeError, match=why):
            request.cache.begin(count)

    @rule(request=requests)
    def append_next_layer(self, request: Request) -> None:
        if not request.begun or request.written == LAYERS:
            return
        layer = request.written
        q, k, v = (random_heads(request.begun, self.seed + i) for i in range(3))
        self.seed += 3
        found = request.cache.append_and_attend(layer, q, k, v)
        request.keys[layer] = torch.cat([request.keys[layer][:, :, : request.size], k], 2)
        request.values[layer] = torch.cat([request.values[layer][:, :, : request.size], v], 2)
        request.written += 1
        torch.testing.assert_close(found, dense_attention(q, request.keys[layer], request.values[layer]))

    @rule(request=requests)
    def misuse(self, request: Request) -> None:
        heads = random_heads(request.begun or 1, 0)
        if not request.begun:
            with pytest.raises(RuntimeError, match="needs begin first"):
                request.cache.append_and_attend(0, heads, heads, heads)
            with pytest.raises(RuntimeError, match="needs begin first"):
                request.cache.commit()
            return
        if request.written:
            with pytest.raises(RuntimeError, match="already written"):
                request.cache.append_and_attend(request.written - 1, heads, heads, heads)
        if request.written < LAYERS:
            wrong = random_heads(request.begun + 1, 0)
            with pytest.raises(ValueError, match="k must be"):
                request.cache.append_and_attend(request.written, heads, wrong, heads)
            with pytest.raises(RuntimeError, match="have not written"):
                request.cache.commit()
        for layer in (-1, LAYERS):
            with pytest.raises(IndexError, match="outside the cache's 2 layers"):
                request.cache.append_and_attend(layer, heads, heads, heads)

    @rule(request=requests)
    def commit(self, request: Request) -> None:
        if request.begun and request.written == LAYERS:
            request.cache.commit()
            request.size += request.begun
            request.begun = request.pending_pages = 0

    @rule(request=requests)
    def abort(self, request: Request) -> None:
        request.cache.abort()
        self.stack += [request.pages.pop() for _ in range(request.pending_pages)]
        request.begun = request.pending_pages = 0

    @rule(request=requests)
    def reset(self, request: Request) -> None:
        self.abort(request)
        request.cache.reset()
        if isinstance(request.cache, PagedKvCache):
            self.stack += request.pages
            request.pages = []
        request.size = 0

    @rule()
    def poison_free_pages(self) -> None:
        """A page's former owner left NaN behind; nobody may see it."""
        for tensor in (*self.pool.pages.keys, *self.pool.pages.values):
            tensor[self.stack] = math.nan

    @invariant()
    def caches_are_as_expected(self) -> None:
        for request in self.all:
            assert request.cache.size == request.size
            assert request.cache.page_table == tuple(request.pages)
        paged = [page for r in self.all if isinstance(r.cache, PagedKvCache) for page in r.pages]
        assert sorted(paged + self.stack) == list(range(PAGES))
        assert self.pool.leased_block_count == len(paged)
        assert self.pool.free_block_count == len(self.stack)


TestRequestsOverOnePool = RequestsOverOnePool.TestCase
TestRequestsOverOnePool.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_begin_needs_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        ContiguousKvCache(CONFIG).begin(0)


def test_leaving_the_block_returns_the_pages_in_table_order() -> None:
    pool = PagedKvCachePool(CONFIG, block_size=PAGE)
    with PagedKvCache(pool) as cache:
        cache.begin(7)
        assert cache.page_table == (0, 1, 2)
        heads = random_heads(7, 0)
        for layer in range(LAYERS):
            cache.append_and_attend(layer, heads, heads, heads)
        cache.commit()
    assert cache.size == 0
    assert pool.lease(4) == [2, 1, 0, 3]


def test_a_begin_that_fails_half_way_gives_its_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagedKvCachePool(CONFIG, block_size=PAGE)
    cache = PagedKvCache(pool)

    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(cache, "_plan", broken)
    with pytest.raises(MemoryError):
        cache.begin(4)
    assert cache.page_table == ()
    assert pool.lease(2) == [0, 1]
