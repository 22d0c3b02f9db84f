"""The ASGI gate before the routes: refuse by the head, read the body whole, then watch over the answer.

A request that reaches the routes has an accepted head, a key if one is needed, and its body is complete. If
its client leaves, its handler is cancelled, and whatever it held is let go: `request.state.resources` is an
exit stack that is closed when a request is over, however it ended.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from riftco.serving.http.access import Access
from riftco.serving.http.answers import refusal_answer
from riftco.serving.http.limits import Progress, TimeLimits
from riftco.serving.http.metrics import Metrics
from riftco.serving.http.request_policy import Refusal, RefusedError, RequestHead, RequestPolicy

_LINGER_SECONDS = 1.0
_DRAINING = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down", retry_after=5)


class RequestGuard:
    """Middleware around the routes of one server."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        policy: RequestPolicy,
        access: Access,
        limits: TimeLimits,
        progress: Progress,
        metrics: Metrics,
    ) -> None:
        self._app = app
        self._policy = policy
        self._access = access
        self._limits = limits
        self._progress = progress
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head = RequestHead.from_scope(scope)
        send = self._observed(head.path, send)
        try:
            async with AsyncExitStack() as resources:
                body = await self._admit(head, scope, receive, resources)
                if body is not None:
                    scope["path"] = head.path
                    await _serve(self._app, scope, body, receive, send)
        except RefusedError as error:
            # The unread body would be taken for the next request: the connection ends with this answer.
            answer = refusal_answer(error.refusal, head.path, close=True)
            await _answer_and_linger(answer, receive, send)

    async def _admit(
        self, head: RequestHead, scope: Scope, receive: Receive, resources: AsyncExitStack
    ) -> bytes | None:
        """The body of a request that may be served, or None when its client left; else RefusedError."""
        refusal = self._policy.refusal(head)
        if refusal is not None:
            raise RefusedError(refusal)
        key = self._access.key_of(head)
        state = scope.setdefault("state", {})
        state["key"], state["resources"] = key, resources
        if head.method != "POST":
            return b""
        if self._progress.draining:
            raise RefusedError(_DRAINING)
        resources.enter_context(self._access.admitted(key))
        resources.enter_context(self._progress.one_more())
        return await self._read_body(int(head.values("content-length")[0]), receive)

    async def _read_body(self, length: int, receive: Receive) -> bytes | None:
        """The body, or None when the client left. RefusedError when it is late or short."""
        body, more, limits = bytearray(), True, self._limits
        late = f"request body did not arrive within {limits.body:g} seconds"
        silent = f"request body stopped arriving for {limits.body_silence:g} seconds"
        async with _within(limits.body, late):
            while more:
                async with _within(limits.body_silence, silent):
                    message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                more = message.get("more_body", False)
        if len(body) < length:
            raise RefusedError(Refusal(HTTPStatus.BAD_REQUEST, "request body ended before Content-Length"))
        return bytes(body)

    def _observed(self, path: str, send: Send) -> Send:
        """Counts the answer; unknown paths are one, or whoever asks for many would fill the memory."""
        known = path if path in self._policy.routes else "other"

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.observe_answer(known, message["status"])
            await send(message)

        return observed


@asynccontextmanager
async def _within(seconds: float, detail: str) -> AsyncIterator[None]:
    """RefusedError (408) with this detail when the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise RefusedError(Refusal(HTTPStatus.REQUEST_TIMEOUT, detail)) from None


async def _serve(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run the app on a body that has been read; cancel it when the client leaves before the answer ends.

    What the request holds is let go before the answer's last byte, for its client may ask again at once.
    """
    answered, resources = False, scope["state"]["resources"]

    async def tracked(message: Message) -> None:
        nonlocal answered
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last:
            # uvicorn writes without waiting, but only once the client has taken what was written before: a
            # piece of nothing is sent when all else has been taken
            whole = message.get("body", b"")
            for piece in (whole[:-1], b""):
                await send({**message, "body": piece, "more_body": True})
            await resources.aclose()
            message = {**message, "body": whole[-1:]}
        await send(message)
        # at once: uvicorn reports an answered client as gone, while the app may still be cleaning up
        answered = last

    async def work() -> None:
        await app(scope, _replay(body), tracked)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(work()), asyncio.create_task(watch())]
    working, _ = tasks
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if answered or working.done():
            await working
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _replay(body: bytes) -> Receive:
    """A `receive` that gives the body and then nothing more: the guard itself watches the client."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await asyncio.Event().wait()  # type: ignore[return-value]

    return replay


async def _answer_and_linger(response: Response, receive: Receive, send: Send) -> None:
    """Send the whole answer, then read on for a moment before the connection closes.

    Closing on a client that is still sending would reset the connection and lose it the answer.
    """
    start: Message = {
        "type": "http.response.start",
        "status": response.status_code,
        "headers": response.raw_headers,
    }
    await send(start)
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            message = await receive()
            while message["type"] == "http.request" and message.get("more_body", False):
                message = await receive()
    await send({"type": "http.response.body", "body": b"", "more_body": False})
