"""Child processes that run a function of a test, all let go at the same moment, and what they have to say."""

import json
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import Any

Say = Callable[[Any], None]
"""Tells the parent something that JSON can hold."""


class Child:
    """A forked process that runs a job until it ends or is killed."""

    def __init__(self, job: Callable[[Say], object]) -> None:
        """Start it."""
        reader, writer = os.pipe()
        self.id = os.fork()
        if self.id == 0:
            os.close(reader)
            _run(job, writer)
        os.close(writer)
        self._reader = reader

    def kill(self) -> None:
        """As `kill -9` does; also of one that has ended already."""
        os.kill(self.id, signal.SIGKILL)

    def wait(self) -> list[Any]:
        """All it said; {"error": traceback} comes last if the job raised."""
        with os.fdopen(self._reader, "rb") as stream:
            lines = stream.read().split(b"\n")
        os.waitpid(self.id, 0)
        return [json.loads(line) for line in lines[:-1]]  # what a kill cut off was not said


def _run(job: Callable[[Say], object], writer: int) -> None:
    def say(what: Any) -> None:
        os.write(writer, json.dumps(what).encode() + b"\n")

    try:
        job(say)
    except BaseException:
        say({"error": traceback.format_exc()[-3000:]})
    finally:
        os._exit(0)


def together(jobs: Sequence[Callable[[Say], object]]) -> list[list[Any]]:
    """Run each job in a process of its own, all begun in the same moment; what each of them said."""
    gate, opener = os.pipe()
    children = [Child(_waiting(job, gate, opener)) for job in jobs]
    os.close(gate)
    os.close(opener)
    return [child.wait() for child in children]


def _waiting(job: Callable[[Say], object], gate: int, opener: int) -> Callable[[Say], object]:
    def run(say: Say) -> None:
        os.close(opener)
        os.read(gate, 1)  # returns when nobody can write any more: the parent has started them all
        job(say)

    return run
