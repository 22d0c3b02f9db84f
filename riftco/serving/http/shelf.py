"""Several bundles in one process: loaded when first asked for, unloaded, least recently used first, for room.

A model in use is never unloaded. What a model takes is computed from its bundle before it is loaded: its
weights as they are served, and its pages of keys and values.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from artifacts import ModelBundle
from riftco.config import ServingConfig
from riftco.serving.engine import EngineStats
from riftco.serving.engine.runner import page_dtype
from riftco.serving.http.request_policy import Refusal, RefusedError
from riftco.serving.service import ModelService, page_layout, require_servable

Source = ModelBundle | str | Path
DEFAULT_NAME = "riftco"
_WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0625, "int8": 1.0625, "nf4": 0.6}  # with scales
_TOTALS = ("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "steps", "violations")


@dataclass(slots=True)
class _Entry:
    """One model: its bundle (None: it was given to us loaded), and its service while it is loaded."""

    source: Source | None
    service: ModelService | None = None
    size: int = 0
    uses: int = 0
    used_at: int = 0
    leaving: ModelService | None = None
    past: EngineStats | None = None


class Shelf:
    """Models by name; the first is the default. A context manager, whose end unloads what it loaded.

    `memory_bytes` is what all loaded models may take together; without it none is ever unloaded. ValueError
    without a single model. Methods may be called from any thread; `acquire` may take as long as loading does.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        config: ServingConfig | None = None,
        *,
        memory_bytes: int | None = None,
    ) -> None:
        if not sources:
            raise ValueError("a shelf needs at least one model")
        self.config = config if config is not None else ServingConfig()
        self._memory_bytes = memory_bytes
        self._entries = {name: _Entry(source) for name, source in sources.items()}
        self._lock = Lock()  # of the entries, never held for long
        self._loading = Lock()  # one model is loaded or unloaded at a time, so that the budget holds
        self._clock = 0
        self._closed = False

    @classmethod
    def of(cls, service: ModelService, name: str = DEFAULT_NAME) -> "Shelf":
        """A shelf with one loaded model, which stays the caller's to close."""
        shelf = cls({name: ""}, service.config)
        shelf._entries[name] = _Entry(None, service)
        return shelf

    @property
    def names(self) -> tuple[str, ...]:
        """What can be asked for."""
        return tuple(self._entries)

    @property
    def default(self) -> str:
        """What is served where no model is named."""
        return self.names[0]

    @property
    def closed(self) -> bool:
        """Whether no model is loaded any more."""
        return self._closed

    def loaded(self, name: str) -> ModelService | None:
        """A model's service, if it is loaded now, without keeping it so."""
        return self._entries[name].service

    def acquire(self, name: str | None = None) -> ModelService:
        """The service of a model, which stays loaded until `release`.

        RefusedError: 404 for an unknown name, 503 when there is no room for it at present or at all, or when
        the shelf is closed. Errors of its bundle as it loads.
        """
        entry = self._entry(name)
        if (service := self._take(entry)) is not None:
            return service
        with self._loading:
            if self._take(entry) is None:  # else another thread has just loaded it
                self._load(entry, name or self.default)
            assert entry.service is not None
            return entry.service

    def take(self, name: str | None = None) -> ModelService | None:
        """As `acquire`, but without waiting: None for a model that is not loaded."""
        return self._take(self._entry(name))

    def release(self, name: str | None = None) -> None:
        """The end of a use; once for each `acquire`."""
        with self._lock:
            self._entry(name).uses -= 1

    def statistics(self) -> dict[str, EngineStats]:
        """Of each model that was ever loaded, its counts now and its totals since the start."""
        with self._lock:
            found = {name: (e.past, e.service or e.leaving) for name, e in self._entries.items()}
        sums = {name: _sum(past, service) for name, (past, service) in found.items()}
        return {name: stats for name, stats in sums.items() if stats is not None}

    def cancel_requests(self) -> None:
        """End whatever the loaded models are at; their clients are told."""
        for name in self.names:
            if (service := self.loaded(name)) is not None:
                service.engine.cancel_all()

    def close(self) -> None:
        """Unload every model that was loaded here, once it has finished what it is at."""
        with self._loading:
            self._closed = True
            for entry in self._entries.values():
                if entry.source is not None:
                    self._unload(entry, forced=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _entry(self, name: str | None) -> _Entry:
        entry = self._entries.get(self.default if name is None else name)
        if entry is None:
            known = ", ".join(self.names)
            detail = f"the model {name!r} does not exist; known are {known}"
            raise RefusedError(Refusal(HTTPStatus.NOT_FOUND, detail, code="model_not_found", param="model"))
        return entry

    def _take(self, entry: _Entry) -> ModelService | None:
        with self._lock:
            if entry.service is not None:
                self._clock += 1
                entry.uses, entry.used_at = entry.uses + 1, self._clock
            return entry.service

    def _load(self, entry: _Entry, name: str) -> None:
        """Load a model, already in use."""
        if self._closed:
            unavailable = HTTPStatus.SERVICE_UNAVAILABLE
            raise RefusedError(Refusal(unavailable, "the shelf is closed", retry_after=5, code="closed"))
        assert entry.source is not None
        bundle = entry.source if isinstance(entry.source, ModelBundle) else ModelBundle.load(entry.source)
        require_servable(bundle, self.config)  # before another one makes room for it
        size = serving_bytes(bundle, self.config)
        self._make_room(size, name)
        service = ModelService(bundle, self.config)
        with self._lock:
            self._clock += 1
            entry.service, entry.size, entry.uses, entry.used_at = service, size, 1, self._clock

    def _make_room(self, size: int, name: str) -> None:
        """Unload the least recently used until `size` bytes fit; RefusedError (503) if they cannot."""
        if self._memory_bytes is None:
            return
        if size > self._memory_bytes:
            detail = f"the model {name!r} needs {size} bytes, more than the {self._memory_bytes} there are"
            raise RefusedError(Refusal(HTTPStatus.SERVICE_UNAVAILABLE, detail, code="model_too_large"))
        while (idle := self._idle_beyond(self._memory_bytes - size)) is not None:
            if not idle:
                detail = f"no room to load the model {name!r} while the others are in use"
                unavailable = HTTPStatus.SERVICE_UNAVAILABLE
                raise RefusedError(Refusal(unavailable, detail, retry_after=5, code="model_not_loaded"))
            self._unload(min(idle, key=lambda entry: entry.used_at))

    def _idle_beyond(self, budget: int) -> list[_Entry] | None:
        """Models that may be unloaded, or None when all the loaded ones together are within a budget.

        Not those whose engines hang: closing one would never end, and health would no longer tell of it.
        """
        with self._lock:
            loaded = [entry for entry in self._entries.values() if entry.service is not None]
            if sum(entry.size for entry in loaded) <= budget:
                return None
            return [entry for entry in loaded if entry.source is not None and self._is_idle(entry)]

    def _is_idle(self, entry: _Entry) -> bool:
        service = entry.service
        alive = service is not None and service.engine.heartbeat_age <= self.config.stall_seconds
        return alive and not entry.uses

    def _unload(self, entry: _Entry, *, forced: bool = False) -> None:
        """Close a model's service, unless it is used (again); `forced` does not ask."""
        with self._lock:
            service = entry.service
            if service is None or (entry.uses and not forced):
                return
            entry.service, entry.leaving = None, service
        service.close()
        with self._lock:
            entry.past, entry.leaving = _sum(entry.past, service), None


def serving_bytes(bundle: ModelBundle, config: ServingConfig) -> int:
    """Memory of a served bundle: its weights, and keys and values for all its pages."""
    model = bundle.config
    page_size, pages = page_layout(config, model.maximum_context)
    number = page_dtype(config.weights).itemsize
    cache = 2 * number * model.block_count * pages * page_size * model.model_width
    linear, kept = _WEIGHT_BYTES[config.weights], 4.0
    weights = sum(x.size * (linear if _is_linear(name) else kept) for name, x in bundle.tensors().items())
    return math.ceil(weights) + cache


def _is_linear(name: str) -> bool:
    """Whether a tensor is stored as `ServingConfig.weights` says; the others stay float32."""
    return name.endswith(".weight") and not name.endswith("embedding.weight")


def _sum(past: EngineStats | None, service: ModelService | None) -> EngineStats | None:
    """Counts of now, zero if the model is not loaded, and totals since the start."""
    now = None if service is None else service.engine.stats()
    if past is None:
        return now
    if now is None:
        return replace(past, running=0, waiting=0, pages=0, free_pages=0, cached_pages=0)
    totals: dict[str, int] = {name: getattr(past, name) + getattr(now, name) for name in _TOTALS}
    finished = Counter(past.requests_finished) + Counter(now.requests_finished)
    return replace(now, requests_finished=dict(finished), **totals)
