"""Uvicorn's h11 protocol, except that what h11 refuses is answered like every other error.

h11 rejects a malformed head (no Host, bad Content-Length, ...) before any application sees it, and uvicorn
answers with bare text. Here the refused head is read leniently and judged by the same policy as any request,
so that the status and JSON do not depend on which layer noticed. A half-closed connection is still answered.
"""

import sys
from http import HTTPStatus

import h11
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from riftco.serving.answers import refusal_answer
from riftco.serving.request_policy import Refusal, RequestHead, RequestPolicy


class ServingProtocol(H11Protocol):
    """One connection. The application carries its policy as `app.state.request_policy`."""

    _unparsed = b""

    def handle_events(self) -> None:
        """Handle what has arrived, keeping the bytes of a head in case h11 refuses them."""
        if self.conn.their_state is h11.IDLE:
            self._unparsed = self.conn.trailing_data[0]
        super().handle_events()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 refused and close; called while h11's error is being handled."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = refusal_answer(self._refusal(sys.exception()), close=True)
            for event in _events(response):
                self.transport.write(self.conn.send(event) or b"")
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
        self.cycle.more_body = False  # the guard compares what came with Content-Length
        self.cycle.message_event.set()
        return True

    def _refusal(self, error: BaseException | None) -> Refusal:
        policy: RequestPolicy = self.config.app.state.request_policy  # type: ignore[union-attr]
        head = RequestHead.from_refused_bytes(self._unparsed)
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
