"""HTTP as bytes on a socket: what a browser or library would hide is what these tests look at."""

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def connect(url: str) -> socket.socket:
    """A connection to the server at this URL."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=20)  # type: ignore[arg-type]


def read_answer(stream: Any, *, head_only: bool = False) -> Answer:
    """The next response of a connection's `makefile("rb")`; EOFError when the server closed it.

    `100 Continue` announces a response and is none.
    """
    while (line := stream.readline()).startswith(b"HTTP/1.1 100"):
        assert stream.readline() == b"\r\n"
    if not line:
        raise EOFError("the server closed the connection")
    headers = {}
    while (header := stream.readline()) != b"\r\n":
        name, _, value = header.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    body = b"" if head_only else stream.read(int(headers["content-length"]))
    return Answer(int(line.split()[1]), headers, body)


def exchange(url: str, request: bytes, *, half_close: bool = False) -> Answer:
    """Send bytes on a connection of their own and read one response."""
    with connect(url) as connection, connection.makefile("rb") as stream:
        connection.sendall(request)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        return read_answer(stream, head_only=request.startswith(b"HEAD"))


def post(body: bytes | dict[str, Any], path: str = "/v1/generate") -> bytes:
    """A generation request as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def read_stream(stream: Any) -> list[Any]:
    """The values of a chunked answer of server-sent events, which must end as it should."""
    assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
    while stream.readline() != b"\r\n":
        pass
    data = b""
    while size := int(stream.readline(), 16):
        data += stream.read(size)
        assert stream.read(2) == b"\r\n"
    events = [event.removeprefix(b"data: ") for event in data.split(b"\n\n")]
    assert events[-2:] == [b"[DONE]", b""]
    return [json.loads(event) for event in events[:-2]]


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether a condition comes to hold."""
    end = monotonic() + seconds
    while not condition():
        if monotonic() > end:
            return False
        sleep(0.005)
    return True
