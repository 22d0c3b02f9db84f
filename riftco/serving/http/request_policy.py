"""Which requests are answered at all: Host, path, method, media type and length, judged from the head alone.

Pure functions of a request's head, so that the same checks run for requests the parser accepts and, read
leniently, for those it refuses. Order: Host (421), path and method (404, 405), Content-Type (415),
Content-Length (400). Keys are checked after these (`access.py`), bodies last.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Any, Self

# host or [IPv6], then an optional port; credentials, blanks and slashes match nowhere
_AUTHORITY = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s\[\]:/@?#]+))(?::(?P<port>[0-9]{0,5}))?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_LARGEST_LENGTH_DIGITS = 20
_LARGEST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer other than 200: status, what to tell the client, and what it might do about it.

    `allow`: for 405, the methods that would do. `retry_after`: seconds after which the same request may
    succeed; without it, it never will. `code` and `param` name the case and the field to OpenAI clients.
    """

    status: HTTPStatus
    detail: str
    allow: str | None = None
    retry_after: int | None = None
    code: str | None = None
    param: str | None = None


class RefusedError(Exception):
    """Raised by whatever finds out that a request cannot be served."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.detail)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Method, target as sent, and headers with lower-case names, of one request."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]

    @classmethod
    def from_scope(cls, scope: Mapping[str, Any]) -> Self:
        """The head of an ASGI `http` scope."""
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        return cls(scope["method"], target.decode("latin-1"), headers)

    @classmethod
    def from_refused_bytes(cls, data: bytes) -> Self | None:
        """What can be read of a head that the parser refused; None if not even a request line."""
        lines = re.split(r"\r?\n", data.decode("latin-1"))
        words = lines[0].split(" ")
        if len(words) != 3:
            return None
        end = lines.index("") if "" in lines else len(lines)
        pairs = (line.partition(":") for line in lines[1:end])
        headers = tuple((name.strip().lower(), value.strip()) for name, colon, value in pairs if colon)
        return cls(words[0], words[1], headers)

    def values(self, name: str) -> list[str]:
        """Every value of a header, in order."""
        return [value for found, value in self.headers if found == name]

    @property
    def path(self) -> str:
        """The target with leading slashes collapsed; a query string stays and makes it another path."""
        return "/" + self.target.lstrip("/") if self.target.startswith("/") else self.target


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """What one server accepts. `routes` maps a path to its method; one ending in / means all below it."""

    routes: Mapping[str, str]
    requires_loopback_host: bool
    maximum_request_bytes: int

    def refusal(self, head: RequestHead) -> Refusal | None:
        """Why this request is not served, or None."""
        checks = (self._host, self._route, self._framing, self._content_type, self._content_length)
        return next((refusal for check in checks if (refusal := check(head))), None)

    def _host(self, head: RequestHead) -> Refusal | None:
        """A web page that rebinds its name to this machine still sends its own name: refuse it."""
        hosts = head.values("host")
        if not self.requires_loopback_host or (len(hosts) == 1 and names_loopback(hosts[0])):
            return None
        return Refusal(HTTPStatus.MISDIRECTED_REQUEST, "loopback server requires a loopback Host header")

    def _route(self, head: RequestHead) -> Refusal | None:
        folders = (path for path in self.routes if path.endswith("/") and path != "/")
        within = next(filter(head.path.startswith, folders), "")
        allowed = self.routes.get(head.path) or self.routes.get(within)
        if allowed == head.method:
            return None
        if allowed is None or head.method in ("GET", "POST"):
            return Refusal(HTTPStatus.NOT_FOUND, "route not found")
        return Refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{head.path} answers {allowed} only", allowed)

    def _framing(self, head: RequestHead) -> Refusal | None:
        """Two lengths are how one request is smuggled past a proxy inside another (RFC 9112, 6.1)."""
        if head.values("content-length") and head.values("transfer-encoding"):
            return _bad_request("Content-Length and Transfer-Encoding must not be combined")
        return None

    def _content_type(self, head: RequestHead) -> Refusal | None:
        media_types = [value.partition(";")[0].strip().lower() for value in head.values("content-type")]
        if head.method != "POST" or media_types[:1] == ["application/json"]:
            return None
        return Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type must be application/json")

    def _content_length(self, head: RequestHead) -> Refusal | None:
        if head.method != "POST":
            return None
        length = next(iter(head.values("content-length")), None)
        if length is None:
            return _bad_request("Content-Length is required")
        if not _INTEGER.fullmatch(length):
            return _bad_request("Content-Length must be an integer")
        if length.startswith("-") or not length.strip("+0"):
            return _bad_request("request body must not be empty")
        if len(length) > _LARGEST_LENGTH_DIGITS or int(length) > self.maximum_request_bytes:
            return _bad_request(f"request body exceeds the {self.maximum_request_bytes}-byte limit")
        return None


def names_loopback(authority: str) -> bool:
    """Whether a Host header, `name[:port]`, means this machine: localhost, 127.0.0.0/8 or [::1]."""
    match = _AUTHORITY.fullmatch(authority.strip())
    if match is None or int(match["port"] or 0) > _LARGEST_PORT:
        return False
    return is_loopback(match["v6"] or match["name"], bracketed=match["v6"] is not None)


def is_loopback(host: str, *, bracketed: bool | None = None) -> bool:
    """Whether a host name or address is this machine's own; `bracketed` says which IP version it must be."""
    try:
        if bracketed or (bracketed is None and ":" in host):
            return IPv6Address(host) == IPv6Address("::1")
        name = host.lower().removesuffix(".")
        return name == "localhost" or IPv4Address(name).is_loopback
    except AddressValueError:
        return False


def _bad_request(detail: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, detail)
