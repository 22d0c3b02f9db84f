"""A server that serves the chat page and answers what a test tells it to, as slowly as the test likes."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import log
from threading import Event, Thread
from typing import Any

from riftco.serving.http.page import page

HEALTH = {
    "status": "ok",
    "artifact_id": "0123456789abcdef" * 4,
    "artifact_stage": "post_training",
    "backend": "cpu",
    "vocabulary_size": 290,
    "maximum_context": 256,
    "maximum_new_tokens": 128,
    "kv_cache": "paged",
    "kv_cache_block_size": 16,
    "mode": "deterministic",
    "weights": "float32",
    "batch_invariant": True,
    "keys": False,
}


@dataclass(frozen=True)
class Refused:
    """An answer other than a stream."""

    status: int
    detail: str


Step = dict[str, Any] | bytes | Event
"""Of a streamed answer: an event, raw bytes, or a moment to wait for."""


@dataclass
class Script:
    """What the server says, and what it was asked."""

    health: dict[str, Any] = field(default_factory=lambda: dict(HEALTH))
    answer: Sequence[Step] | Refused = ()
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    client_left: Event = field(default_factory=Event)
    url: str = ""


def token(token_id: int, text: str, *alternatives: tuple[str, float], share: float = 0.5) -> dict[str, Any]:
    """The event of one token with this probability; alternatives are (text, probability)."""
    top = [[900 + i, log(p), other] for i, (other, p) in enumerate(alternatives)]
    top = sorted([[token_id, log(share), text], *top], key=lambda row: -row[1])
    entry = {"token_id": token_id, "logprob": log(share), "top": top}
    return {"token_ids": [token_id], "text": text, "tokens": [text], "logprobs": [entry]}


def done(prompt: int, generated: int, reason: str = "length", cached: int = 0) -> list[Step]:
    """The end of a stream."""
    usage = {"prompt_tokens": prompt, "cached_tokens": cached, "generated_tokens": generated}
    return [{"finish_reason": reason, "usage": usage}, b"data: [DONE]\n\n"]


def answer(text: str, *, prompt: int = 20, reason: str = "stop") -> list[Step]:
    """A stream of one token per word."""
    words = text.replace(" ", "\0 ").split("\0")
    return [*(token(i, word) for i, word in enumerate(words)), *done(prompt, len(words), reason)]


@contextmanager
def scripted_server(script: Script) -> Iterator[str]:
    """Serve a script for the length of a `with` block, which gets the URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/":
                document, policy = page()
                headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy}
                self._reply(200, document, headers)
            elif self.path == "/health":
                self._json(200 if script.health["status"] == "ok" else 503, script.health)
            else:
                self._json(404, {"detail": "no such page"})

        def do_POST(self) -> None:
            script.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            script.authorizations.append(self.headers["Authorization"])
            if isinstance(script.answer, Refused):
                self._json(script.answer.status, {"error": "Refused", "detail": script.answer.detail})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                for step in script.answer:
                    self._take(step)
            except OSError:
                script.client_left.set()

        def _take(self, step: Step) -> None:
            if isinstance(step, Event):
                while not step.wait(0.02):
                    self.wfile.write(b": still here\n\n")  # fails soon after the client left
            else:
                self.wfile.write(
                    step if isinstance(step, bytes) else f"data: {json.dumps(step)}\n\n".encode()
                )

        def _json(self, status: int, value: dict[str, Any]) -> None:
            self._reply(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
