"""Uvicorn's h11 protocol, made sure that every connection ends and that every refusal is answered alike.

h11 rejects a malformed head (no Host, bad Content-Length, ...) before any application sees it, and uvicorn
answers with bare text. Here the refused head is read leniently and judged by the same policy as any request,
so that the status and JSON do not depend on which layer noticed.

Uvicorn waits for ever for the end of a head and for a client that does not read. Here each has its time.

A client that closes its end of the connection may have left, or may have nothing more to say and wait for
the answer: the bytes are the same. While its answer has not begun it is sent `100 Continue`, which every
client skips and which makes the system of one that left report so; a request is then cancelled at once.
"""

import asyncio
import socket
import struct
import sys
from http import HTTPStatus

import h11
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from riftco.serving.http.answers import refusal_answer
from riftco.serving.http.limits import TimeLimits
from riftco.serving.http.request_policy import Refusal, RequestHead, RequestPolicy

_CONTINUE = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
_RESET = struct.pack("ii", 1, 0)
_FIRST_PROBE_SECONDS, _LAST_PROBE_SECONDS = 0.02, 1.0


class ServingProtocol(H11Protocol):
    """One connection. The application carries `request_policy` and `time_limits` in its `state`."""

    _unparsed = b""
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    @property
    def _limits(self) -> TimeLimits:
        return self.config.app.state.time_limits  # type: ignore[union-attr]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The head of the first request is awaited from now on."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # `pause_writing` whenever the system takes no more
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing of the connection remains."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_head_timer()
        self._stop_write_timer()

    def handle_events(self) -> None:
        """Handle what has arrived, keeping the bytes of a head in case h11 refuses them."""
        if self.conn.their_state is h11.IDLE:
            self._unparsed = self.conn.trailing_data[0]
        super().handle_events()
        self._watch_client()

    def on_response_complete(self) -> None:
        """An answer is written, perhaps before all of its request has come."""
        super().on_response_complete()
        self._watch_client()

    def pause_writing(self) -> None:
        """The client reads slower than we write: from now on its progress is watched."""
        super().pause_writing()
        self._time_write()

    def resume_writing(self) -> None:
        """The client has taken everything."""
        super().resume_writing()
        self._stop_write_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 refused and close; called while h11's error is being handled."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head = RequestHead.from_refused_bytes(self._unparsed)
            self._write(self._refusal(head, sys.exception()), head.path if head else "")
            if self.cycle is not None:
                self.cycle.disconnected = True  # answered here: the application's answer goes nowhere
        self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client will send no more: finish the request it may have begun, then close.

        Returns whether the transport stays open for the answer.
        """
        if self.cycle is None or self.cycle.response_complete:
            return False
        self.cycle.keep_alive = False
        if self.cycle.more_body:
            self.cycle.more_body = False  # the guard compares what came with Content-Length
            self.cycle.message_event.set()
        else:
            self._probe(_FIRST_PROBE_SECONDS)
        return True

    def _probe(self, seconds: float) -> None:
        """Write to a client that may have left; the second write to one that has fails and is noticed."""
        waiting = self.conn.our_state is h11.SEND_RESPONSE and not self.transport.is_closing()
        if waiting and self.scope["http_version"] != "1.0":  # which does not know 100
            self.transport.write(self.conn.send(_CONTINUE) or b"")
            self.loop.call_later(seconds, self._probe, min(2 * seconds, _LAST_PROBE_SECONDS))

    def _watch_client(self) -> None:
        """Time the rest of a head that has begun, or of a body that nobody waits for any more."""
        state = self.conn.their_state
        unwanted = self.cycle is not None and self.cycle.response_complete and state is h11.SEND_BODY
        if unwanted or (state is h11.IDLE and self._unparsed):
            self._time_head()
        else:
            self._stop_head_timer()

    def _time_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._limits.head, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._unparsed and self.conn.their_state is h11.IDLE:  # who said nothing asked nothing
            detail = f"request head did not arrive within {self._limits.head:g} seconds"
            self._write(Refusal(HTTPStatus.REQUEST_TIMEOUT, detail), "")
        self.transport.close()

    def _time_write(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self._limits.write, self._check_write, size)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_write(self, size: int) -> None:
        """Give up a client that took too little of `size` unwritten bytes."""
        if size - self.transport.get_write_buffer_size() < min(size, self._limits.least_written):
            # with a reset: otherwise the system would keep trying to deliver what it holds
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()
        else:
            self._time_write()

    def _write(self, refusal: Refusal, path: str) -> None:
        for event in _events(refusal_answer(refusal, path, close=True)):
            self.transport.write(self.conn.send(event) or b"")

    def _refusal(self, head: RequestHead | None, error: BaseException | None) -> Refusal:
        policy: RequestPolicy = self.config.app.state.request_policy  # type: ignore[union-attr]
        if self.conn.their_state is h11.ERROR and head is not None:
            refusal = policy.refusal(head)
            if refusal is not None:
                return refusal
        hint = getattr(error, "error_status_hint", HTTPStatus.BAD_REQUEST)
        return Refusal(HTTPStatus(hint), f"malformed HTTP request: {error}")


def _events(response: Response) -> list[h11.Event]:
    start = h11.Response(
        status_code=response.status_code,
        headers=response.raw_headers,
        reason=HTTPStatus(response.status_code).phrase.encode("ascii"),
    )
    return [start, h11.Data(data=bytes(response.body)), h11.EndOfMessage()]
