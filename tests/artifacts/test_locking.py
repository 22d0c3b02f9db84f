"""The store's lock: writers together, a collector alone, and nobody waits for ever."""

import os
import threading
import time
from pathlib import Path

import pytest

from artifacts import StoreError
from artifacts.locking import StoreLock

SOON = 0.2


@pytest.fixture
def lock(tmp_path: Path) -> StoreLock:
    return StoreLock(tmp_path)


class Holder(threading.Thread):
    """Holds a lock until it is told to let go."""

    def __init__(self, hold) -> None:
        super().__init__(daemon=True)
        self._hold, self.has_it, self.let_go = hold, threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self._hold():
            self.has_it.set()
            self.let_go.wait(10)

    def finish(self) -> None:
        self.let_go.set()
        self.join(10)


def test_writers_share_the_lock(lock):
    with lock.shared():
        other = Holder(lock.shared)
        assert other.has_it.wait(5)
        other.finish()


def test_a_collector_waits_for_writers_and_writers_for_it(lock):
    with lock.shared():
        collector = Holder(lock.exclusive)
        assert not collector.has_it.wait(SOON)
    assert collector.has_it.wait(5)
    writer = Holder(lock.shared)
    assert not writer.has_it.wait(SOON)
    collector.finish()
    assert writer.has_it.wait(5)
    writer.finish()


def test_writers_cannot_keep_a_collector_out(lock):
    """Writers who come while a collector waits stand behind it."""
    first = Holder(lock.shared)
    assert first.has_it.wait(5)
    collector = Holder(lock.exclusive)
    time.sleep(SOON)
    late = Holder(lock.shared)
    assert not late.has_it.wait(SOON)
    first.finish()
    assert collector.has_it.wait(5)
    assert not late.has_it.is_set()
    collector.finish()
    assert late.has_it.wait(5)
    late.finish()


def test_the_lock_goes_with_a_killed_process(lock):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with lock.exclusive():
            os.write(writer, b"!")
            time.sleep(60)
        os._exit(0)
    os.read(reader, 1)
    os.kill(child, 9)
    os.waitpid(child, 0)
    with lock.shared():
        pass
    os.close(reader)
    os.close(writer)


def test_a_child_that_was_forked_inside_does_not_hold_on_to_it(lock):
    with lock.exclusive():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    other = Holder(lock.exclusive)
    try:
        assert other.has_it.wait(5)
    finally:
        other.finish()
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_folder_without_room_for_a_lock_is_a_store_error(tmp_path):
    (tmp_path / "locks").write_text("in the way")
    with pytest.raises(StoreError), StoreLock(tmp_path).shared():
        pass
