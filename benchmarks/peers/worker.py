"""One contender in a process of its own: `worker.py MODULE SIZE METHOD VARIANT`.

It says by a line of JSON what its first step took, or why it cannot take one. Then it reads numbers, takes
that many steps and answers with the processor and wall seconds, and the peak of its resident memory in MiB.
"""

import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[2])

import torch

from benchmarks.peers.work import SIZES


def main() -> None:
    """Serve until standard input ends."""
    module, size, method, variant = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        take = importlib.import_module(f"benchmarks.peers.{module}").step(SIZES[size], method, variant)
        _say(**_measured(take, 1))
    except Exception as error:  # whatever it is, it is the reason why this peer has no figure
        _say(reason=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
        return
    for line in sys.stdin:
        _say(**_measured(take, int(line)))


def _measured(take: Callable[[], None], steps: int) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        take()
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "peak": _peak()}


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def _peak() -> float:
    """MiB of memory at the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


if __name__ == "__main__":
    main()
