"""A real S3 server (moto's) on a port of this machine, and a proxy before it that loses what it is told to.

The client under test speaks HTTP over sockets to both: its own handling of lost connections is tested too.
"""

import http.client
import http.server
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Literal
from unittest import mock

from artifacts.bucket import Bucket, open_bucket
from artifacts.retry import Patience

Fault = Literal["reset", "hang", "503", "truncated", "lost", "500", "403", "501"]
"""What happens to a request.

Not done: the connection is reset, nothing is answered for HANG seconds, or the server is too busy, denies it
or does not know how. Done, but: half of the body arrives, or half of the head if there is no body; the
connection is reset instead of an answer; or the server says that it failed.
"""

FAULTS: tuple[Fault, ...] = ("reset", "hang", "503", "truncated", "lost", "500")
HANG = 0.25
_CODES = {"403": "AccessDenied", "500": "InternalError", "501": "NotImplemented", "503": "SlowDown"}


@dataclass
class Proxy:
    """Where the proxy listens, what it has seen, and what it shall do to the n-th request from now on."""

    url: str = ""
    seen: list[str] = field(default_factory=list)
    page: int = 0
    """How many keys a page of a listing may have, if not 0."""
    dropped: frozenset[str] = frozenset()
    """Headers of requests that do not reach the server."""
    faults: dict[int, Fault] = field(default_factory=dict)
    headers: list[dict[str, str]] = field(default_factory=list)
    canned: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Part of a request's path -> status and body to answer instead of the server."""

    def reset(self, faults: dict[int, Fault] | None = None) -> None:
        self.seen, self.headers, self.faults, self.page, self.canned = [], [], faults or {}, 0, {}


class Server:
    """A moto server in this process; `url` takes any credentials."""

    def __init__(self, url: str) -> None:
        from moto.s3.models import s3_backends

        self.url = url
        self._backend = s3_backends["123456789012"]["aws"]
        self._backend.reset()
        self._backend.create_bucket("bucket", "us-east-1")

    def contents(self) -> dict[str, bytes]:
        """What the bucket called `bucket` holds, by key."""
        return {key: value.value for key, value in self._backend.buckets["bucket"].keys.items()}

    def wipe(self, *, but: str = "") -> None:
        """Remove all keys except one."""
        keys = self._backend.buckets["bucket"].keys
        for key in list(keys):
            if key != but:
                del keys[key]


@contextmanager
def s3_server() -> Iterator[Server]:
    """A server with one empty bucket, called `bucket`."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield Server(f"http://{host}:{port}")
    finally:
        server.stop()
        server._server.server_close()


@cache
def shared_bucket(url: str, patience: Patience) -> Bucket:
    """`open_bucket`, once for each place: a client takes longer to make than a hundred requests."""
    return open_bucket(url, patience)


@contextmanager
def credentials_for(url: str) -> Iterator[None]:
    """Let clients that are opened meanwhile talk to the server at `url`, and to no other account."""
    variables = {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
    variables |= {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_CONFIG_FILE": os.devnull,
    }
    shared_bucket.cache_clear()
    with mock.patch.dict(os.environ, variables):
        yield
    shared_bucket.cache_clear()


def error_body(code: str) -> bytes:
    """What S3 says when it refuses."""
    return f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()


@contextmanager
def faulty_proxy(target: str) -> Iterator[Proxy]:
    """A proxy to the server at `target`, an `http://host:port`; handles one request at a time."""
    proxy, lock = Proxy(), threading.Lock()
    host, port = target.removeprefix("http://").split(":")

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except OSError:  # the client has given up
                self.close_connection = True

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def _relay(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with lock:
                fault = proxy.faults.get(len(proxy.seen))
                proxy.seen.append(f"{self.command} {self.path}")
                proxy.headers.append(dict(self.headers))
                canned = next((proxy.canned[part] for part in proxy.canned if part in self.path), None)
                undone = canned or fault in ("reset", "hang", "503", "403", "501")
                answer = None if undone else self._forward(body)
            if fault == "hang":
                stopped.wait(HANG)
            if fault in ("reset", "hang", "lost"):
                self._reset()
            elif fault in _CODES:
                self._fail(int(fault))
            elif canned:
                self._send(*canned)
            elif answer:
                self._answer(*answer, truncated=fault == "truncated")

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _relay

        def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(host, int(port))
            headers = {
                name: value for name, value in self.headers.items() if name not in proxy.dropped | {"Expect"}
            }
            limit = f"&max-keys={proxy.page}" if proxy.page and "list-type" in self.path else ""
            connection.request(self.command, self.path + limit, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            headers = {name: value for name, value in answer.getheaders() if name != "Connection"}
            connection.close()
            return answer.status, headers, content

        def _answer(self, status: int, headers: dict[str, str], content: bytes, *, truncated: bool) -> None:
            lines = [f"HTTP/1.1 {status} Answer", *(f"{name}: {value}" for name, value in headers.items())]
            head = "\r\n".join(lines).encode() + b"\r\n\r\n"
            if truncated:
                cut = len(content) // 2
                self.wfile.write(head + content[:cut] if content else head[: len(head) // 2])
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_WR)
                self.close_connection = True
            else:
                self.wfile.write(head + content)
                self.wfile.flush()

        def _fail(self, status: int) -> None:
            self._send(status, error_body(_CODES[str(status)]))

        def _send(self, status: int, content: bytes) -> None:
            headers = {"Content-Type": "application/xml", "Content-Length": str(len(content))}
            self._answer(status, headers, b"" if self.command == "HEAD" else content, truncated=False)

        def _reset(self) -> None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()

    stopped = threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield proxy
    finally:
        stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()
