"""Training steps beside those of other people's tools, interleaved in one run.

    python benchmarks/training.py [--quick] [--json FILE] [--peers PYTHON] [--size NAME] [--method NAME]

Every contender is a process of its own on one thread with the same allocator settings, and takes its steps in
turn with the others; figures are tokens of processor time, the best of the rounds, and peak resident memory.
Who needs longer than ten seconds for a step takes one, which is its figure.
Peers run in the interpreter that `--peers` names (one with transformers, peft, bitsandbytes and
riftco-transformer beside torch), by default this one.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # the project, wherever this is run from

from benchmarks.harness import Row, row, shown
from benchmarks.kernel_rows.timing import one_thread, product_limit
from benchmarks.peers.work import SIZES, Size

MALLOC = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"
VARIANTS = ("fp32", "bf16", "fp32 compiled", "bf16 compiled")
OURS = {"fp32": "full", "bf16": "half", "int8": "int8"}  # compiled blocks gained 0 to 4 % and cost 230 MiB
PEERS = {"nanogpt": VARIANTS, "hugging_face": VARIANTS[:3], "original": ("",)}
PEER_NAMES = {
    ("nanogpt", "full"): "nanoGPT",
    ("hugging_face", "full"): "transformers",
    ("hugging_face", "lora"): "transformers + peft",
    ("hugging_face", "qlora"): "transformers + bitsandbytes",
    ("original", "full"): "riftco-transformer",
}
TARGETS = {  # by peer and method: at 256x6x256, at the other sizes
    ("nanogpt", "full"): (2.0, 1.5),
    ("hugging_face", "full"): (2.5, 1.5),
    ("hugging_face", "lora"): (1.5, None),
    ("hugging_face", "qlora"): (2.0, None),
    ("original", "full"): (150.0, None),
}
METHODS = ("full", "lora", "qlora")
SLOW = 10.0  # seconds


class Contender:
    """A worker process and the best that it has shown."""

    def __init__(self, python: str, module: str, size: Size, method: str, variant: str) -> None:
        self.module, self.variant = module, variant
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": MALLOC}
        command = [python, str(ROOT / "benchmarks/peers/worker.py"), module, size.name, method, variant]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.seconds, self.wall, self.peak = float("inf"), float("inf"), 0.0
        self.reason: str | None = None
        self._note(1)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        return {"reason": f"its process ended with {self.process.wait()}"}

    def take(self, steps: int) -> None:
        """Take steps and remember the best mean."""
        assert self.process.stdin is not None
        print(steps, file=self.process.stdin, flush=True)
        self._note(steps)

    def _note(self, steps: int) -> None:
        found = self._read()
        if "reason" in found:
            self.reason = found["reason"]
            return
        self.seconds = min(self.seconds, found["cpu"] / steps)
        self.wall, self.peak = min(self.wall, found["wall"] / steps), found["peak"]

    def close(self) -> None:
        self.process.communicate()


def rows(size: Size, method: str, rounds: int, peers: str) -> Iterator[Row]:
    """The rows of one size and method."""
    field = [Contender(sys.executable, "ours", size, method, variant) for variant in OURS]
    field += [Contender(peers, m, size, method, variant) for m in PEERS for variant in PEERS[m]]
    try:
        for turn in range(rounds):
            for contender in field:
                compiled_before = turn == 0 and "compiled" in contender.variant
                if contender.reason is None and (contender.seconds < SLOW or compiled_before):
                    contender.take(max(1, 1000 // size.tokens))
    finally:
        for contender in field:
            contender.close()
    yield from _table(field, size, method)


def _table(field: list[Contender], size: Size, method: str) -> Iterator[Row]:
    for contender in field:
        if contender.reason is None:
            values = f"{size.tokens / contender.seconds:8.0f} tokens/s, {contender.peak:6.0f} MiB"
            print(f"  {contender.module:12} {contender.variant:14} {values}", file=sys.stderr)
        else:
            print(f"  {contender.module:12} {contender.variant:14} {contender.reason}", file=sys.stderr)
    ours = _best(field, "ours")
    assert ours is not None, next(c.reason for c in field if c.module == "ours")
    middle = size.name == "256x6x256"
    work = f"{method} {size.name}"
    limit = size.multiply_adds(method) * 2 / product_limit(OURS[ours.variant]) / 1e9
    floor = {"floor": round(size.tokens / limit), "variant": ours.variant}
    for module in PEERS:
        name = PEER_NAMES.get((module, method), f"{module} {method}")
        speed, memory = f"{work}, one thread", f"{work}, peak memory"
        target = TARGETS.get((module, method), (None, None))[0 if middle else 1]
        peer = _best(field, module)
        mine = size.tokens / ours.seconds
        if peer is None:
            reason = next((c.reason for c in field if c.module == module), "not tried")
            yield row(speed, mine, "tokens/s", name, None, target, reason=reason, **floor)
            continue
        theirs = size.tokens / peer.seconds
        yield row(speed, mine, "tokens/s", name, theirs, target, peer_variant=peer.variant, **floor)
        yield row(memory, ours.peak, "MiB", name, peer.peak, 1.0, variant=ours.variant)


def _best(field: list[Contender], module: str) -> Contender | None:
    candidates = [c for c in field if c.module == module and c.reason is None]
    return min(candidates, key=lambda c: c.seconds, default=None)


def main() -> None:
    """Measure, print each row when it is there, and write all as JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, without the largest model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="the peers' interpreter")
    parser.add_argument("--size", choices=SIZES, help="only this size")
    parser.add_argument("--method", choices=METHODS, help="only this method")
    arguments = parser.parse_args()
    measured = []
    for size in SIZES.values():
        if arguments.size not in (None, size.name) or (arguments.quick and size.width > 256):
            continue
        for method in METHODS if arguments.method is None else (arguments.method,):
            with one_thread():
                for found in rows(size, method, 2 if arguments.quick else 8, arguments.peers):
                    measured.append(found)
                    print(shown(found), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
