"""The physical pages of keys and values that request caches lease, in memory and on one lock.

One page id addresses the matching page in every layer. The accounts are the engine's `PagePool`, whose free
pages are a last-in, first-out stack that yields 0, 1, 2, ... at first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Self

import torch
from torch import Tensor

from artifacts import ModelConfig
from riftco.backends import BackendName, torch_device
from riftco.serving.engine.page_pool import PagePool


@dataclass(frozen=True, slots=True)
class KvPages:
    """Storage: for each layer one tensor of keys and one of values, float32 `[pages, H, page, d]`."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def zeros(cls, config: ModelConfig, page_count: int, page_size: int, backend: BackendName) -> Self:
        """Zeroed pages for every layer of a model of these dimensions."""
        shape = (page_count, config.head_count, page_size, config.model_width // config.head_count)
        device = torch_device(backend)

        def tensors() -> tuple[Tensor, ...]:
            return tuple(torch.zeros(shape, device=device) for _ in range(config.block_count))

        return cls(tensors(), tensors())


class PagedKvCachePool:
    """A fixed number of pages of `block_size` tokens each; a `PagedKvCache` leases and returns them.

    `block_count` 0 means exactly the pages of one full context. ValueError for a block size below 1 or for
    pages that cannot hold one full context.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        block_size: int = 16,
        block_count: int = 0,
        backend: BackendName = "cpu",
    ) -> None:
        require_int("block_size", block_size, 1)
        require_int("block_count", block_count, 0)
        self.config = config
        self.backend = backend
        self.block_size = block_size
        self.blocks_per_full_cache = -(-config.maximum_context // block_size)
        self.block_count = block_count or self.blocks_per_full_cache
        if self.block_count < self.blocks_per_full_cache:
            raise ValueError(
                f"{block_count} pages of {block_size} tokens cannot hold one full context of "
                f"{config.maximum_context}; use at least {self.blocks_per_full_cache}, or 0"
            )
        self.pages = KvPages.zeros(config, self.block_count, block_size, backend)
        self._lock = Lock()
        self._accounts = PagePool(self.block_count)

    def fits(self, config: ModelConfig, backend: BackendName) -> bool:
        """Whether a model of these dimensions on this backend can keep its keys and values here."""
        return self.backend == backend and _dimensions(self.config) == _dimensions(config)

    @property
    def free_block_count(self) -> int:
        return self._accounts.free_count

    @property
    def leased_block_count(self) -> int:
        return self.block_count - self._accounts.free_count

    def lease(self, count: int) -> list[int]:
        """Take `count` pages off the stack, all or none; RuntimeError when there are too few."""
        with self._lock:
            try:
                return self._accounts.take(count)
            except RuntimeError as error:
                raise RuntimeError(f"{error}; reset or close another cache, or enlarge the pool") from None

    def release(self, pages: Sequence[int]) -> None:
        """Put pages back in this order: the last one is leased first. ValueError if one is not leased."""
        with self._lock:
            self._accounts.release(pages)


def _dimensions(config: ModelConfig) -> tuple[int, ...]:
    return config.block_count, config.head_count, config.model_width, config.maximum_context


def require_int(name: str, value: int, lowest: int) -> None:
    """TypeError unless `value` is an int (a bool is none), ValueError if it is below `lowest`."""
    if type(value) is not int:
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < lowest:
        raise ValueError(f"{name} must be at least {lowest}, got {value}")
