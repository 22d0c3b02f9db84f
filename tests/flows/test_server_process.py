"""Each of the two ties between the server's process and its parent is enough to end it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 20
TIED = f"""
import time
from flows.server_process import end_with_parent
end_with_parent()
print("tied", flush=True)
time.sleep({SECONDS})
"""
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {TIED!r}])
time.sleep({SECONDS})
"""


def test_it_ends_with_its_input() -> None:
    command = [sys.executable, "-c", TIED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"tied\n"
        process.stdin.close()
        assert process.wait(SECONDS / 2) == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_it_ends_with_its_parent_though_its_input_stays_open() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"tied\n"
        parent.kill()
        killed = time.monotonic()
        assert parent.stdout.read() == b""  # the child holds the other end of this pipe until it ends
        assert time.monotonic() - killed < SECONDS / 2
        assert not parent.stdin.closed
