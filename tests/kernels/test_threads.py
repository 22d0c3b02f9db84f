"""The threads that share the compiled code's work: many callers, forks, signals, and always the same bits."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kernels import gelu, linear
from kernels.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="no native code was built")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def operands(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(700, 64, generator=generator), torch.randn(256, 64, generator=generator)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_many_callers_at_once_get_what_each_gets_alone(count: int) -> None:
    torch.set_num_threads(1)
    expected = [gelu(linear(*operands(seed))) for seed in range(6)]

    def many(seed: int) -> bool:
        torch.set_num_threads(count)
        found = (gelu(linear(*operands(seed))) for _ in range(15))
        return all(torch.equal(one, expected[seed]) for one in found)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(many, range(6))) == [True] * 6


PROCESS = """
import os, sys, torch
from kernels import gelu
torch.set_num_threads(3)
x = torch.full((2000, 1024), 9.0)
assert gelu(x).eq(9).all()
print(os.getpid(), flush=True)
{body}
"""


@contextmanager
def running(body: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that has used the threads, killed at the end if it still runs."""
    command = [sys.executable, "-c", PROCESS.format(body=body)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_forked_child_has_threads_of_its_own() -> None:
    body = """
if os.fork() == 0:
    y = gelu(x)
    torch.set_num_threads(1)  # torch's own threads do not survive a fork
    os._exit(0 if y.eq(9).all() else 1)
sys.exit(os.wait()[1])
"""
    with running(body) as process:
        assert process.wait(60) == 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_they_leave_signals_to_the_thread_that_acts_on_them() -> None:
    with running("import time; time.sleep(60)") as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == str(process.pid)
        blocked = {}
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            status = dict(
                line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line
            )
            blocked[int(task.name)] = bool(int(status["SigBlk"], 16) >> (signal.SIGINT - 1) & 1)
    assert sum(blocked.values()) >= 2, "three threads share work: two of them beside the caller"
    assert not blocked[process.pid], "the main thread hears signals"


def test_there_is_no_openmp_in_the_library() -> None:
    """It would bring barriers that wait for threads which do not run."""
    assert b"GOMP_" not in Path(library()._name).read_bytes()  # type: ignore[union-attr]
