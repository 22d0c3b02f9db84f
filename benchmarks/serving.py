"""Serving beside other people's engines, interleaved in one run, and what only an engine of ours promises.

    python benchmarks/serving.py [--quick] [--json FILE] [--peers PYTHON] [--threads N] [--only PART]

Model: width 256, 6 blocks, 8 heads, context 256, vocabulary 4,096, the same random weights for everybody,
all tokens greedy. Peers run in the interpreter that `--peers` names (one with torch, transformers,
ctranslate2, llama-cpp-python, gguf and riftco-transformer), by default this one; what it lacks gives a row
with the reason.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # the project, wherever this is run from

from artifacts import ModelBundle
from benchmarks.harness import Row, shown
from benchmarks.serving_peers.work import write_model

PARTS = ("speed", "window", "cold-start", "http")


def rows(folder: Path, parts: tuple[str, ...], peers: str, threads: int, quick: bool) -> Iterator[Row]:
    """The rows of the parts, in their order."""
    path = write_model(folder)
    if "speed" in parts:
        from benchmarks.serving_rows import speed

        yield from speed.rows(folder, peers, threads, 2 if quick else 8)
    if "window" in parts:
        from benchmarks.serving_rows import window

        bundle = ModelBundle.load(path)
        yield from window.prefix_rows(bundle, threads)
        yield from window.rollover_rows(bundle, threads, quick)
    if "cold-start" in parts:
        from benchmarks.serving_rows import cold_start

        yield from cold_start.rows(folder, 1 if quick else 3)
    if "http" in parts:
        from benchmarks.serving_rows import http

        yield from http.rows(path, threads, quick)


def main() -> None:
    """Measure, print each row when it is there, and write all as JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="the peers' interpreter")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of every contender")
    parser.add_argument("--only", choices=PARTS, help="only this part")
    arguments = parser.parse_args()
    parts = PARTS if arguments.only is None else (arguments.only,)
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        for found in rows(Path(folder), parts, arguments.peers, arguments.threads, arguments.quick):
            measured.append(found)
            print(shown(found), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
