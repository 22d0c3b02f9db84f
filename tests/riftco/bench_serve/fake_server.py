"""A server whose answers a test writes down: what it sends, how slowly, and what it saw."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Pieces = Iterator[bytes]
STREAM = "text/event-stream; charset=utf-8"


@dataclass
class FakeServer:
    """`answer` gets a request's JSON and gives status, content type and the pieces of the body."""

    answer: Callable[[dict[str, Any]], tuple[int, str, Pieces]]
    health: dict[str, Any] | None = None
    models: tuple[str, ...] = ("fake",)
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most_in_flight: int = 0
    in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, body: dict[str, Any], key: str | None) -> None:
        with self.lock:
            self.bodies.append(body)
            self.keys.append(key)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def leave(self) -> None:
        with self.lock:
            self.in_flight -= 1


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """Run it on a free port for the length of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(200, {"data": [{"id": name} for name in fake.models]})
            elif self.path == "/health" and fake.health is not None:
                self._send(200, fake.health)
            else:
                self._send(404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.enter(body, self.headers["Authorization"])
            status, kind, pieces = fake.answer(body)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            try:
                for piece in pieces:
                    self.wfile.write(piece)
                    self.wfile.flush()
            except OSError:
                pass  # the client left
            finally:
                fake.leave()

        def log_message(self, *_: object) -> None:
            pass

        def _send(self, status: int, value: Any) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


def chunk(text: str, finish: str | None = None) -> bytes:
    """An event of a stream of completions."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(prompt: int, new: int, cached: int | None = None) -> bytes:
    """The event that counts tokens."""
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": new}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"choices": [], "usage": counts})


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def answers(*pieces: bytes) -> Callable[[dict[str, Any]], tuple[int, str, Pieces]]:
    """The same stream for every request."""
    return lambda _: (200, STREAM, iter(pieces))


def two_tokens(body: dict[str, Any]) -> tuple[int, str, Pieces]:
    """Two tokens for a prompt of words or ids, as an honest server counts them."""
    prompt = body["prompt"]
    size = len(prompt) if isinstance(prompt, list) else len(prompt.split())
    return 200, STREAM, iter([chunk("a"), chunk("b", "length"), usage(size, 2, size // 2), DONE])
