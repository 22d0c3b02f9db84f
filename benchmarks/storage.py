"""Storage speed beside the system's own tools, in one interleaved run.

    python benchmarks/storage.py [--quick] [--json FILE]

`fsck --full` hashes every object of a store; the peer is `sha256sum` over the same files, as one process.
Putting a file is copying, hashing and syncing it; the peer is `cp` and `sync`, which hash nothing. Wall
seconds, the best of the rounds, files in the page cache.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # the project, wherever this is run from

import numpy as np

from artifacts import Store
from artifacts.fsck import check_store
from benchmarks.harness import main, row

MIB = 1 << 20


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """One row for checking a whole store, one for putting a large file."""
    size, rounds = (32 * MIB, 3) if quick else (512 * MIB, 5)
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(Path(folder, "store"))
        blocks = np.random.default_rng(1).integers(0, 256, (8, size // 8), dtype=np.uint8)
        objects = [str(store.path(store.put_bytes("block", block.tobytes()))) for block in blocks]
        ours, theirs = interleaved(
            lambda: check_store(store, full=True), lambda: run("sha256sum", *objects), rounds
        )
        work = f"check {size // MIB} MiB in 8 objects"
        yield row(work, size / ours / 1e6, "MB/s", "sha256sum", size / theirs / 1e6, 0.6)

        source, copy = Path(folder, "source"), Path(folder, "copy")
        source.write_bytes(blocks.tobytes())

        def put() -> None:
            (digest,) = {store.put_file("file", source).digest} - set(objects)
            store.objects.path(digest).unlink()  # or the next round would find it there

        def copied() -> None:
            run("cp", str(source), str(copy))
            run("sync", str(copy))

        ours, theirs = interleaved(put, copied, rounds)
        work = f"put a file of {size // MIB} MiB"
        yield row(work, size / ours / 1e6, "MB/s", "cp and sync, without a hash", size / theirs / 1e6, None)


def interleaved(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The best wall seconds of each, taking turns."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for side, call in enumerate((ours, theirs)):
            start = time.perf_counter()
            call()
            best[side] = min(best[side], time.perf_counter() - start)
    return best[0], best[1]


def run(*command: str) -> None:
    """A command whose output does not matter."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(__doc__, rows)
