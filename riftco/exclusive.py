"""A lock between processes that the kernel releases when its holder dies, however it dies."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from artifacts.locking import is_at

_POLL_SECONDS = 0.2


@contextmanager
def exclusive(
    path: Path, on_wait: Callable[[], None], go_on: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold the lock named by a file; `on_wait` is called once if somebody else holds it. Leaves no file.

    go_on: called now and then while waiting; what it raises ends the wait.

    The holder removes the file before letting go, so whoever waited may own the lock of a file that is no
    longer the one at `path`: then it starts over.
    """
    told = False
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileExistsError, FileNotFoundError):  # the last holder has just removed the folder
            if path.parent.exists() and not path.parent.is_dir():
                raise
            continue
        try:
            if not _is_free(descriptor):
                if not told:
                    on_wait()
                told = True
                while not _is_free(descriptor):  # a thread that slept in flock could not be stopped
                    go_on()
                    time.sleep(_POLL_SECONDS)
            if is_at(path, descriptor):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """Whether the lock was free; it is ours now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
