"""What every generating route does: borrow a model, submit requests to it, tell failures from answers.

Whatever a request holds, its model and its place in the engine, hangs on the request's own exit stack, which
the guard closes when the request is over; so a client that leaves cancels what it asked for.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial, wraps
from http import HTTPStatus
from typing import TypeVar, TypeVarTuple

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from riftco.serving.engine import Event, GenerationRequest, QueueFullError
from riftco.serving.http.access import ApiKey
from riftco.serving.http.answers import refusal_answer
from riftco.serving.http.events import Bell, EventQueue
from riftco.serving.http.metrics import Metrics
from riftco.serving.http.request_policy import Refusal, RefusedError
from riftco.serving.http.shelf import Shelf
from riftco.serving.service import ModelService

_logger = logging.getLogger("riftco.serving")
Handler = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks: the API key, if one was needed, and what is let go of when the request is over."""

    key: ApiKey | None
    resources: AsyncExitStack

    @classmethod
    def of(cls, request: Request) -> "Client":
        """As the guard left it with the request."""
        return cls(request.state.key, request.state.resources)

    @property
    def salt(self) -> bytes:
        """Requests of different keys never share cached pages."""
        return b"" if self.key is None else self.key.salt


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The models and the figures of one server."""

    shelf: Shelf
    metrics: Metrics
    bell: Bell = field(default_factory=Bell)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def borrow(self, name: str | None, client: Client) -> ModelService:
        """A model, loaded if need be, for as long as the request lasts; RefusedError when it cannot be."""
        service = self.shelf.take(name)
        if service is None:
            async with self.loading:  # whoever waits for a load waits here, and leaves the threads to others
                return await in_thread(self._load, name, client)
        client.resources.callback(self.shelf.release, name)
        return service

    def _load(self, name: str | None, client: Client) -> ModelService:
        try:
            service = self.shelf.acquire(name)
        except RefusedError:
            raise
        except Exception:
            # a bundle that is damaged or gone: the log tells which file, the client that it is not its fault
            name = name or self.shelf.default
            _logger.exception("the model %r could not be loaded", name)
            detail = f"the model {name!r} could not be loaded"
            refusal = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, detail, code="model_not_loaded")
            raise RefusedError(refusal) from None
        client.resources.callback(self.shelf.release, name)
        return service

    def submit(
        self, service: ModelService, name: str | None, requests: Sequence[GenerationRequest], client: Client
    ) -> EventQueue:
        """Have requests answered. RefusedError: 429 if too many wait, 400 for nonsense, 503 when closed."""
        observe = partial(self.metrics.observe_request, name or self.shelf.default)
        try:
            queue = EventQueue(service.engine, requests, observe, self.bell)
        except QueueFullError as error:
            refusal = Refusal(
                HTTPStatus.TOO_MANY_REQUESTS,
                str(error),
                retry_after=error.retry_after_seconds,
                code="queue_full",
            )
            raise RefusedError(refusal) from None
        except RuntimeError as error:
            unavailable = HTTPStatus.SERVICE_UNAVAILABLE
            raise RefusedError(Refusal(unavailable, str(error), retry_after=5, code="closed")) from None
        except ValueError as error:
            raise RefusedError(bad_request(str(error))) from None
        client.resources.callback(queue.cancel)
        return queue


async def in_thread(work: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
    """`run_in_threadpool`, but a cancelled caller waits for the thread.

    What the thread takes would otherwise come when what gives it back is over.
    """
    running = asyncio.ensure_future(run_in_threadpool(work, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        running.exception()  # nobody is left to be told, which asyncio would complain of
        raise


def bad_request(detail: str, code: str | None = None, param: str | None = None) -> Refusal:
    """A 400."""
    return Refusal(HTTPStatus.BAD_REQUEST, detail, code=code, param=param)


def failure(event: Event) -> Refusal | None:
    """What to tell the client of an event that ends a choice otherwise than by its own will."""
    if event.finish == "timeout":
        return Refusal(HTTPStatus.GATEWAY_TIMEOUT, "the request's deadline has passed", code="timeout")
    if event.finish == "cancelled":
        detail = "the server ended the request"
        return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, detail, retry_after=5, code="cancelled")
    if event.finish == "error":
        _logger.error("generation failed: %s", event.error)
        return Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "generation failed", code="generation_failed")
    return None


def answering(handler: Handler) -> Handler:
    """Turn a handler's exceptions into answers; the unforeseen is logged, and a 500 that tells nothing."""

    @wraps(handler)
    async def wrapped(request: Request) -> Response:
        path = request.scope["path"]
        try:
            return await handler(request)
        except RefusedError as error:
            return refusal_answer(error.refusal, path)
        except Exception:
            _logger.exception("a request failed")
            refusal = Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "generation failed")
            return refusal_answer(refusal, path)

    return wrapped
