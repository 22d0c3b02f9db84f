"""One contender in a process of its own: `worker.py MODULE VARIANT FOLDER THREADS`.

It says by a line of JSON that it is ready, or why it is not. Then it reads lines such as `sixteen 3`, does
that work with the prompts of that turn, and answers with wall and processor seconds and what it generated.
"""

import importlib
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[2])

from benchmarks.serving_peers.work import WORKS


def main() -> None:
    """Serve until standard input ends."""
    module, variant, folder, threads = sys.argv[1:]
    warnings.simplefilter("ignore")
    try:
        load = importlib.import_module(f"benchmarks.serving_peers.{module}").load
        generate = load(Path(folder), variant, int(threads))
        generate(WORKS["one"].prompts(0), 2)
    except Exception as error:  # whatever it is, it is the reason why this peer has no figure
        lines = str(error).splitlines() or [""]
        _say(reason=f"{type(error).__name__}: {lines[0][:200]}")
        return
    _say(ready=True)
    for line in sys.stdin:
        name, turn = line.split()
        work = WORKS[name]
        prompts = work.prompts(int(turn))
        cpu, wall = time.process_time(), time.perf_counter()
        ids = generate(prompts, work.new)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        _say(wall=wall, cpu=cpu, tokens=sum(map(len, ids)), ids=[row[:8] for row in ids])


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
