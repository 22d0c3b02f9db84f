"""Trying again what failed for a moment: a bounded number of times, each after a longer pause.

Pauses double and are drawn from a range, so that clients that failed together do not come back together.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from artifacts.errors import StoreError

Result = TypeVar("Result")


class TemporaryError(StoreError):
    """A failure that may be gone at the next try: a timeout, a lost connection, an overloaded server."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to go on when a remote store does not answer. Times are in seconds."""

    tries: int = 6
    """Failures in a row after which to give up."""
    first_pause: float = 0.5
    longest_pause: float = 20.0
    answer_timeout: float = 30.0
    """How long one request may go without a byte."""
    sleep: Callable[[float], None] = time.sleep

    def retry(self, action: Callable[[], Result]) -> Result:
        """The action's result; each TemporaryError is another try, the last one is raised."""
        failures = 0
        while True:
            try:
                return action()
            except TemporaryError as error:
                failures += 1
                self._pause(failures, error)

    def resume(self, stream_from: Callable[[int], Iterator[bytes]], size: int) -> Iterator[bytes]:
        """The chunks of a stream of `size` bytes, reopened at the offset reached whenever it breaks off.

        Failures count anew once bytes have arrived. Raises the last TemporaryError.
        """
        offset = failures = 0
        while offset < size:
            try:
                for chunk in stream_from(offset):
                    offset += len(chunk)
                    failures = 0
                    yield chunk
                return  # the end, wherever it is: the caller knows what should have come
            except TemporaryError as error:
                failures += 1
                self._pause(failures, error)

    def _pause(self, failures: int, error: TemporaryError) -> None:
        if failures >= self.tries:
            raise error
        longest = min(self.first_pause * 2 ** (failures - 1), self.longest_pause)
        self.sleep(longest * random.uniform(0.5, 1.0))
