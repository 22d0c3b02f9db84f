"""How long a client may keep a connection busy without getting on, and how a server ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds. With the defaults a connection on which nothing happens is closed within 10 s."""

    head: float = 5.0
    """From a request's first byte, or from connecting, to the end of its head."""
    body: float = 30.0
    """From the head to the end of the body."""
    body_silence: float = 5.0
    """Between two pieces of a body."""
    write: float = 8.0
    """Without `least_written` bytes being taken by a client that has an answer to read."""
    least_written: int = 8_192
    drain: float = 60.0
    """For requests in progress to finish once the server was told to stop."""


@dataclass(slots=True)
class Progress:
    """Requests with a body that are in progress, and whether the server has been told to stop."""

    running: int = 0
    draining: bool = False

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count a request for the length of a block."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
