"""The lock between processes: one holder at a time, and free again however the holder ends."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from riftco.exclusive import exclusive

HOLDER = """
import sys, time
from pathlib import Path
from riftco.exclusive import exclusive
with exclusive(Path(sys.argv[1]), lambda: None):
    print("held", flush=True)
    time.sleep(60)
"""


def nobody_waits() -> None:
    raise AssertionError("the lock was held by somebody else")


def test_threads_take_turns(tmp_path: Path) -> None:
    inside, most, waits = 0, 0, 0
    guard = threading.Lock()

    def note_wait() -> None:
        nonlocal waits
        with guard:
            waits += 1

    def work() -> None:
        nonlocal inside, most
        for _ in range(5):
            with exclusive(tmp_path / "folder" / "a.lock", note_wait):
                with guard:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.002)
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert waits > 0


def test_who_waited_holds_the_lock_although_the_last_holder_removed_its_folder(tmp_path: Path) -> None:
    path, waiting, held = tmp_path / "folder" / "a.lock", threading.Event(), threading.Event()

    def wait() -> None:
        with exclusive(path, waiting.set):
            held.set()

    waiter = threading.Thread(target=wait)
    with exclusive(path, nobody_waits):
        waiter.start()
        assert waiting.wait(10)
        path.unlink()
        path.parent.rmdir()
    waiter.join(10)
    assert held.is_set()


def test_different_locks_do_not_wait_for_each_other(tmp_path: Path) -> None:
    with exclusive(tmp_path / "a", nobody_waits), exclusive(tmp_path / "b", nobody_waits):
        pass


def test_no_file_is_left(tmp_path: Path) -> None:
    with exclusive(tmp_path / "a.lock", nobody_waits):
        assert (tmp_path / "a.lock").exists()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path / "a.lock", nobody_waits):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        waited = threading.Event()
        threading.Timer(0.2, holder.send_signal, [signal.SIGKILL]).start()
        with exclusive(path, waited.set):
            assert waited.is_set()
            assert holder.wait(10) == -signal.SIGKILL
    assert not path.exists()


def test_who_waits_for_several_holders_is_told_once(tmp_path: Path) -> None:
    told: list[int] = []

    def work(number: int) -> None:
        with exclusive(tmp_path / "a.lock", lambda: told.append(number)):
            time.sleep(0.05)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == len(set(told)) == 3


def test_what_is_raised_while_waiting_ends_the_wait(tmp_path: Path) -> None:
    turns: list[int] = []

    def tire() -> None:
        turns.append(1)
        if len(turns) == 3:
            raise TimeoutError

    with exclusive(tmp_path / "a.lock", nobody_waits):
        with pytest.raises(TimeoutError), exclusive(tmp_path / "a.lock", lambda: None, tire):
            raise AssertionError("entered a lock that is held")
        assert len(turns) == 3
