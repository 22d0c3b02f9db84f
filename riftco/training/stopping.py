"""Stopping between two steps: a signal waits until the run is at a step boundary and its state is kept."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody asked the process to end."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def deferred_signals() -> Iterator[StopRequest]:
    """While open, the first SIGINT or SIGTERM is only noted; on leaving, it is delivered again.

    Whoever sees the request leaves the block as soon as nothing can be lost. A second signal does at once
    what it did before. Signals reach the main thread only: in any other the request never comes.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    # An ignored signal stays ignored; a handler that was not set from Python could not be put back.
    before = {n: handler for n, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = number
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()
        if request.signal is not None:
            signal.raise_signal(request.signal)
