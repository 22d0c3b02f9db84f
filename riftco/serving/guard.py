"""The ASGI gate before the routes: refuse by the head, then read the body whole, within size and time."""

import asyncio
from contextlib import suppress
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from riftco.serving.answers import refusal_answer
from riftco.serving.request_policy import Refusal, RequestHead, RequestPolicy

_LINGER_SECONDS = 1.0


class RequestGuard:
    """Middleware: a request that reaches the app has an accepted head and its body is complete."""

    def __init__(self, app: ASGIApp, *, policy: RequestPolicy, body_seconds: float) -> None:
        self._app = app
        self._policy = policy
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head = RequestHead.from_scope(scope)
        refusal = self._policy.refusal(head)
        if refusal is None and head.method == "POST":
            outcome = await self._read_body(int(head.values("content-length")[0]), receive)
            if outcome is None:
                return  # the client left: there is nobody to answer
            if isinstance(outcome, Refusal):
                refusal = outcome
            else:
                receive = _replay(outcome, receive)
        if refusal is not None:
            # The unread body would be taken for the next request: the connection ends with this answer.
            await _answer_and_linger(refusal_answer(refusal, close=True), receive, send)
            return
        scope["path"] = head.path
        await self._app(scope, receive, send)

    async def _read_body(self, length: int, receive: Receive) -> bytes | Refusal | None:
        """The body, why it cannot be had, or None when the client left."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            detail = f"request body did not arrive within {self._body_seconds:g} seconds"
            return Refusal(HTTPStatus.REQUEST_TIMEOUT, detail)
        if len(body) < length:
            return Refusal(HTTPStatus.BAD_REQUEST, "request body ended before Content-Length")
        return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body again, then whatever comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

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
