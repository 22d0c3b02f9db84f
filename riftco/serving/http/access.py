"""Who may ask: API keys from a file, and how much each may ask for.

The file has one key a line, `name:SHA-256 of the key in hex`, optionally followed by limits:

    alice:9f86d081884c7d65...  concurrent=4 per_minute=60

Who adds or removes a line changes who may ask at once. Only hashes are stored. Keys are 256 random bits, so a
plain hash of one cannot be searched for, and equal times for right and wrong keys are all that a comparison
has to care about.
"""

import hashlib
import hmac
import logging
import math
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from time import monotonic

from riftco.serving.http.request_policy import Refusal, RefusedError, RequestHead

_logger = logging.getLogger("riftco.serving")

OPEN_PATHS = frozenset({"/", "/chat", "/health", "/v1/health", "/ready"})
"""What is answered without a key: the page asks for one itself, probes have none."""

_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64}):(?P<digest>[0-9a-f]{64})(?P<limits>(\s+\w+=\d+)*)")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's owner, its SHA-256, and its limits: requests at one time, requests a minute (None: any)."""

    name: str
    digest: bytes
    concurrent: int | None = None
    per_minute: int | None = None

    def __post_init__(self) -> None:
        for limit in ("concurrent", "per_minute"):
            value = getattr(self, limit)
            if value is not None and value < 1:
                raise ValueError(f"{limit} of key {self.name!r} must be at least 1, got {value}")

    @property
    def salt(self) -> bytes:
        """Separates this key's cached pages from everybody else's."""
        return self.digest


@dataclass(slots=True)
class _Use:
    """What a key uses now: requests running, and a bucket of requests that refills evenly over a minute."""

    running: int
    allowance: float
    at: float


class Access:
    """The keys of one server. Without keys everybody may ask for everything. Not thread-safe."""

    def __init__(self, keys: Sequence[ApiKey] = (), *, clock: Callable[[], float] = monotonic) -> None:
        self.required = bool(keys)
        self._clock = clock
        self._file: Path | None = None
        self._version: tuple[int, ...] = ()
        self._use: dict[str, _Use] = {}
        self._set(keys)

    @classmethod
    def from_file(cls, path: str | Path) -> "Access":
        """The keys of a file, which is read again whenever it has changed.

        ValueError names the line that is wrong, or says that there is none. Later a file that is wrong or
        gone changes nothing, and one without keys lets nobody in.
        """
        version = _version(Path(path))
        access = cls(_read(Path(path)))
        if not access.required:
            raise ValueError(f"{path} has no keys; without any, everybody would be let in")
        access._file, access._version = Path(path), version
        return access

    def _set(self, keys: Sequence[ApiKey]) -> None:
        names = [key.name for key in keys]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"key {twice!r} is given twice")
        self.keys = tuple(keys)
        for key in keys:
            self._use.setdefault(key.name, _Use(0, key.per_minute or math.inf, self._clock()))

    def _refresh(self) -> None:
        """Read the file again if it has changed."""
        if self._file is None or (version := _version(self._file)) == self._version:
            return
        self._version = version
        try:
            self._set(_read(self._file))
        except (OSError, ValueError) as error:
            _logger.error("the API keys stay as they were: %s", error)

    def key_of(self, head: RequestHead) -> ApiKey | None:
        """The key that a request carries; None where none is needed. RefusedError (401) for all others."""
        if not self.required or head.path in OPEN_PATHS:
            return None
        self._refresh()
        scheme, _, token = next(iter(head.values("authorization")), "").partition(" ")
        given = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        # every key is compared, so that the time taken does not depend on which one it is
        matches = [key for key in self.keys if hmac.compare_digest(key.digest, given)]
        if scheme.lower() == "bearer" and matches:
            return matches[0]
        what = "the API key is wrong" if token else "an API key is required: Authorization: Bearer KEY"
        raise RefusedError(Refusal(HTTPStatus.UNAUTHORIZED, what, code="invalid_api_key"))

    @contextmanager
    def admitted(self, key: ApiKey | None) -> Iterator[None]:
        """Count a request against its key while it runs. RefusedError (429) when it is one too many."""
        if key is None:
            yield
            return
        use = self._use[key.name]
        self._take(key, use)
        use.running += 1
        try:
            yield
        finally:
            use.running -= 1

    def _take(self, key: ApiKey, use: _Use) -> None:
        if key.concurrent is not None and use.running >= key.concurrent:
            detail = f"key {key.name!r} has {use.running} requests running, which is its limit"
            raise RefusedError(_too_many(detail, 1))
        if key.per_minute is None:
            return
        now = self._clock()
        per_second = key.per_minute / 60
        use.allowance = min(key.per_minute, use.allowance + (now - use.at) * per_second)
        use.at = now
        if use.allowance < 1:
            detail = f"key {key.name!r} may ask {key.per_minute} times a minute"
            raise RefusedError(_too_many(detail, max(1, math.ceil((1 - use.allowance) / per_second))))
        use.allowance -= 1


def new_key(name: str) -> tuple[str, str]:
    """A fresh key, to be given to its owner, and the line that lets it in, to be added to the key file."""
    key = f"riftco-{secrets.token_urlsafe(32)}"
    line = f"{name}:{hashlib.sha256(key.encode('ascii')).hexdigest()}"
    _parse(line, "name")
    return key, line


def _version(file: Path) -> tuple[int, ...]:
    """What changes when a file does; () for one that cannot be looked at."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(file: Path) -> list[ApiKey]:
    lines = file.read_text(encoding="utf-8").splitlines()
    entries = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    return [_parse(line, f"{file}:{n}") for n, line in entries if line and not line.startswith("#")]


def _parse(line: str, where: str) -> ApiKey:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError(f"{where}: expected NAME:SHA256 [concurrent=N] [per_minute=N], got {line[:80]!r}")
    limits = dict(pair.split("=") for pair in match["limits"].split())
    unknown = limits.keys() - {"concurrent", "per_minute"}
    if unknown:
        raise ValueError(f"{where}: unknown limit {sorted(unknown)[0]!r}; use concurrent or per_minute")
    counts = {name: int(value) for name, value in limits.items()}
    return ApiKey(match["name"], bytes.fromhex(match["digest"]), **counts)


def _too_many(detail: str, retry_after: int) -> Refusal:
    return Refusal(HTTPStatus.TOO_MANY_REQUESTS, detail, retry_after=retry_after, code="rate_limit_exceeded")
