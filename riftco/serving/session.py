"""One sequence, decoded token by token over its own key/value cache.

A session appends and never crops: what to do when the context is full is the caller's decision (see
`generator`). It refuses to go on after the model's parameters changed, because its keys and values would
belong to another model.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Literal, NoReturn, Self

import torch
from torch import Tensor

from riftco.model import DecoderOnlyTransformer
from riftco.serving.kv_cache import ContiguousKvCache, PagedKvCache, RequestKvCache
from riftco.serving.page_pool import PagedKvCachePool, require_int

CacheKind = Literal["paged", "contiguous"]
_KINDS: dict[str | int, CacheKind] = {
    "paged": "paged",
    "contiguous": "contiguous",
    1: "paged",
    0: "contiguous",
}
_LARGEST_TOKEN = 2**32 - 1


class DecodeSession:
    """Appends tokens to one sequence and gives the logits of the next; a context manager, not copyable.

    `cache` is `paged` or `contiguous`, `block_size` the tokens of a page (it may exceed the context). The
    session leases from `pool` when one is given, else from a private pool of one full context. It keeps the
    model alive. TypeError for a bool, ValueError for an unknown cache, a block size below 1 or a pool for
    another model.
    """

    def __init__(
        self,
        model: DecoderOnlyTransformer,
        cache: str | int = "paged",
        block_size: int = 16,
        *,
        pool: PagedKvCachePool | None = None,
    ) -> None:
        self.cache = cache_kind(cache)
        self._model: DecoderOnlyTransformer | None = model
        self._request_cache = _request_cache(model, self.cache, block_size, pool)
        with model.activity.lock:
            model.activity.register("session", self)
            self._remember_parameters(model)
        self.capacity = self._request_cache.capacity
        self.block_size = self.capacity
        if self.cache == "paged":
            self.block_size = pool.block_size if pool is not None else block_size

    @property
    def cache_kind(self) -> CacheKind:
        """The same as `cache`."""
        return self.cache

    @property
    def size(self) -> int:
        """Tokens appended since the start or the last reset."""
        return self._request_cache.size

    @property
    def closed(self) -> bool:
        return self._model is None

    def step(self, token: int) -> Tensor:
        """Append one token and return the logits of the next, float32 `[V]`; errors as `extend`."""
        return self.extend((token,))

    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens with one forward and return the logits after the last one, float32 `[V]`.

        TypeError for a token that is not an int, ValueError for one that is negative or outside the
        vocabulary and for no tokens, OverflowError above 2^32 - 1; RuntimeError when the capacity is
        exhausted, the session closed or the model changed. After an error the session is as before.
        """
        model = self._open_model()
        for token in tokens:
            _require_token(token)
        if not tokens:
            raise ValueError("a session needs at least one token to append")
        if self.size + len(tokens) > self.capacity:
            raise RuntimeError(
                f"the session's capacity is exhausted: {self.size} of {self.capacity} tokens are used and "
                f"{len(tokens)} more do not fit; reset it and replay the newest tokens"
            )
        if [parameter._version for parameter in self._parameters] != self._versions:
            raise RuntimeError("the model's parameters changed while the session was open; reset it first")
        token_ids = torch.tensor(tokens, dtype=torch.int64, device=model.device)
        return model.decode(token_ids, self._request_cache)[-1]

    def reset(self) -> None:
        """Forget all tokens; RuntimeError when closed."""
        model = self._open_model()
        self._request_cache.reset()
        self._remember_parameters(model)

    def close(self) -> None:
        """Return the pages and let go of the model; harmless when repeated."""
        self._request_cache.reset()
        if self._model is not None:
            self._model.activity.release(self)
        self._model = None
        self._parameters.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a decode session cannot be copied: two sessions would write the same pages")

    def _open_model(self) -> DecoderOnlyTransformer:
        if self._model is None:
            raise RuntimeError("the decode session is closed")
        return self._model

    def _remember_parameters(self, model: DecoderOnlyTransformer) -> None:
        """Note each parameter's version, which torch counts up at every write in place."""
        self._parameters = list(model.parameters())
        self._versions = [parameter._version for parameter in self._parameters]


def cache_kind(cache: str | int) -> CacheKind:
    """The kind a name (any case, padded) or a code (1 paged, 0 contiguous) stands for.

    TypeError for a bool, ValueError for anything else.
    """
    if isinstance(cache, bool):
        raise TypeError("cache must be 'paged' or 'contiguous', not a bool")
    key = cache.strip().lower() if isinstance(cache, str) else cache
    if not isinstance(key, str | int) or key not in _KINDS:
        raise ValueError(f"cache must be 'paged' or 'contiguous', got {cache!r}")
    return _KINDS[key]


def _request_cache(
    model: DecoderOnlyTransformer, kind: CacheKind, block_size: int, pool: PagedKvCachePool | None
) -> RequestKvCache:
    require_int("block_size", block_size, 1)
    if kind == "contiguous":
        if pool is not None:
            raise ValueError("a contiguous cache leases nothing; open it without a pool")
        return ContiguousKvCache(model.config, backend=model.backend)
    if pool is None:
        return PagedKvCache(PagedKvCachePool(model.config, block_size=block_size, backend=model.backend))
    if not pool.fits(model.config, model.backend):
        raise ValueError("the page pool was made for a model of other dimensions or on another backend")
    return PagedKvCache(pool)


def _require_token(token: int) -> None:
    if isinstance(token, bool) or not isinstance(token, int):
        raise TypeError(f"a token id must be an integer, got {token!r}")
    if token < 0:
        raise ValueError(f"a token id must not be negative, got {token}")
    if token > _LARGEST_TOKEN:
        raise OverflowError(f"a token id must be at most 2**32 - 1, got {token}")
