"""SIGTERM as an exception, for blocks that must leave nothing running behind."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import NoReturn


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Within the block SIGTERM raises SystemExit(143); only in the main thread, which alone gets signals."""
    if current_thread() is not main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)
