"""A contender of the speed rows: a worker process, and the best that it has shown at each work."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).parents[1] / "serving_peers/worker.py"


@dataclass(slots=True)
class Best:
    """The least seconds that a work took, by the clock on the wall and by the processor's."""

    wall: float = float("inf")
    cpu: float = float("inf")
    tokens: int = 0
    ids: tuple[tuple[int, ...], ...] = ()
    """The first tokens of each stream, in the first turn."""


class Contender:
    """`reason` says why it is not there, and is None for one that runs."""

    def __init__(self, python: str, module: str, variant: str, folder: Path, threads: int) -> None:
        self.module, self.variant = module, variant
        self.best: dict[str, Best] = {}
        self.reason: str | None = None
        self._process = subprocess.Popen(
            [python, str(_WORKER), module, variant, str(folder), str(threads)],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def wait(self) -> None:
        """Until it is ready, or is known not to be."""
        self._read()

    def take(self, work: str, turn: int) -> None:
        """Do a work and remember the best of its turns."""
        assert self._process.stdin is not None
        print(work, turn, file=self._process.stdin, flush=True)
        found = self._read()
        if self.reason is None:
            first = Best(tokens=found["tokens"], ids=tuple(map(tuple, found["ids"])))
            best = self.best.setdefault(work, first)
            best.wall, best.cpu = min(best.wall, found["wall"]), min(best.cpu, found["cpu"])

    def close(self) -> None:
        """End it; harmless when repeated."""
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                self.reason = found.get("reason")
                return found
        self.reason = f"its process ended with {self._process.wait()}"
        return {}
