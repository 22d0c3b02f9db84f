"""The lock between those who write to a store and those who collect its garbage.

Writers share it; a collector holds it alone. The kernel releases it when a process dies, however it dies.
Readers take none: what they see is complete, and what a reference reaches is never collected.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from artifacts.disk_errors import writing


class StoreLock:
    """The lock of the store in a folder. Not re-entrant: whoever holds it must not take it again."""

    def __init__(self, root: Path) -> None:
        """`root` is the store's folder."""
        self._root = root

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with other writers."""
        with self._held("turnstile", fcntl.LOCK_SH):
            descriptor = self._take("store", fcntl.LOCK_SH)
        try:
            yield
        finally:
            _release(descriptor)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock alone. New writers wait at the turnstile, or they could keep a collector out."""
        with self._held("turnstile", fcntl.LOCK_EX), self._held("store", fcntl.LOCK_EX):
            yield

    @contextmanager
    def tags(self) -> Iterator[None]:
        """Hold the lock of everybody who moves a tag, to be taken inside `shared`."""
        with self._held("tags", fcntl.LOCK_EX):
            yield

    @contextmanager
    def _held(self, name: str, kind: int) -> Iterator[None]:
        descriptor = self._take(name, kind)
        try:
            yield
        finally:
            _release(descriptor)

    def _take(self, name: str, kind: int) -> int:
        path = self._root / "locks" / f"{name}.lock"
        with writing(self._root):
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, kind)
            except BaseException:
                os.close(descriptor)
                raise
        return descriptor


@contextmanager
def hold_if_free(path: Path) -> Iterator[bool]:
    """Hold a step's lock unless somebody is at work on the step; says whether it is held.

    A step that was killed leaves the file of its lock, and the kernel lets go of the lock itself. The rules
    are those of `riftco.exclusive`: whoever holds the lock removes its file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    held = False
    try:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = is_at(path, descriptor)
        yield held
    finally:
        if held:
            path.unlink(missing_ok=True)
        _release(descriptor)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is still the one at its path, and not removed by whoever held its lock before."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _release(descriptor: int) -> None:
    with suppress(OSError):  # nothing was written through it, and the kernel has let go
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have the descriptor too: not only closing
        os.close(descriptor)
