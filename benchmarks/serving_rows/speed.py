"""One stream, sixteen, and the first token of a long prompt: ours and the peers in turns, on equal weights.

Every contender is a process of its own with the same number of threads. Figures are the best of the rounds
by the clock on the wall; `cpu_ratio` is the same ratio by processor time, for a machine that does other work
too. `agreement` is the share of tokens that the peer chose as our float32 does, among the first 8 of each
stream.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.harness import Row, row
from benchmarks.serving_peers.work import WORKS
from benchmarks.serving_rows.contender import Best, Contender

OURS = ("fast float32", "fast bfloat16", "fast int8", "fast nf4")
DETERMINISTIC = "deterministic float32"
PEERS = {
    "llama": ("F32", "BF16", "Q8_0", "Q4_0"),
    "ctranslate": ("float32", "int8"),
    "hugging_face": ("float32", "bfloat16"),
    "original": ("float32",),
}
NAMES = {
    "ours": "our own",
    "llama": "llama.cpp",
    "ctranslate": "CTranslate2",
    "hugging_face": "transformers",
    "original": "riftco-transformer",
}
TITLES = {"one": "one stream", "sixteen": "sixteen streams", "first": "first token of a 192-token prompt"}
SAME_PRECISION = tuple(zip(OURS, PEERS["llama"], strict=True))
LLAMA_TARGETS = {"one": 1.2, "sixteen": 2.0, "first": 2.0}
_SLOW_SECONDS = 2.0
NO_VLLM = "no wheel of it for CPUs is on PyPI"


def rows(folder: Path, peers: str, threads: int, rounds: int) -> Iterator[Row]:
    """All rows of speed; `peers` is the interpreter that has them."""
    ours = (*OURS, DETERMINISTIC)
    field = [Contender(sys.executable, "ours", variant, folder, threads) for variant in ours]
    field += [Contender(peers, m, variant, folder, threads) for m in PEERS for variant in PEERS[m]]
    try:
        for contender in field:
            contender.wait()
        for turn in range(1, rounds + 1):
            for work in WORKS:
                for contender in field[:: 1 if turn % 2 else -1]:
                    if contender.reason is None and _is_worthwhile(contender, work):
                        contender.take(work, turn)
    finally:
        for contender in field:
            contender.close()
    yield from _Table(field).rows()


def _is_worthwhile(contender: Contender, work: str) -> bool:
    """The original takes one stream; and what takes seconds is timed once."""
    if contender.module == "original" and WORKS[work].streams > 1:
        return False
    return work not in contender.best or contender.best[work].wall < _SLOW_SECONDS


class _Table:
    """What the contenders have shown."""

    def __init__(self, field: Iterable[Contender]) -> None:
        self._field = list(field)

    def rows(self) -> Iterator[Row]:
        for work in WORKS:
            for contender in self._field:
                self._print(contender, work)
            for mine, theirs in SAME_PRECISION:
                target = LLAMA_TARGETS[work] if work != "first" else None
                yield self._row(work, [mine], "llama", [theirs], target)
            yield self._row(work, OURS, "llama", None, 2.0 if work == "first" else None)
            yield self._row(work, OURS, "ctranslate", None, 1.3 if work == "sixteen" else None)
            yield self._row(work, OURS, "hugging_face", None, None)
        yield self._row("one", [DETERMINISTIC], "original", None, 20.0)
        yield self._row("first", [DETERMINISTIC], "original", None, None)
        yield self._row("sixteen", [DETERMINISTIC], "ours", [OURS[0]], 0.5)
        ours = self._best("sixteen", "ours", OURS)
        value, unit = self._value("sixteen", ours)
        yield row(TITLES["sixteen"], value, unit, "vLLM", None, 1.3, reason=NO_VLLM)

    def _row(
        self, work: str, mine: Iterable[str], module: str, theirs: Iterable[str] | None, target: float | None
    ) -> Row:
        """The best of our variants against the best of a peer's, all of them by default."""
        ours, peer = self._best(work, "ours", mine), self._best(work, module, theirs)
        value, unit = self._value(work, ours)
        title = f"{TITLES[work]}, {ours.variant}"
        if work not in peer.best:
            name = NAMES[module] if theirs is None else f"{NAMES[module]} {peer.variant}"
            return row(title, value, unit, name, None, target, reason=peer.reason or "not tried")
        mine_best, best = ours.best[work], peer.best[work]
        more = {"cpu_ratio": round(_cpu(best) / _cpu(mine_best), 3)}
        if module != "original":  # it has weights of its own
            more["agreement"] = self._agreement(work, best)
        name = f"{NAMES[module]} {peer.variant}"
        return row(title, value, unit, name, self._value(work, peer)[0], target, **more)

    def _best(self, work: str, module: str, variants: Iterable[str] | None) -> Contender:
        wanted = [
            c for c in self._field if c.module == module and (variants is None or c.variant in variants)
        ]
        there = [c for c in wanted if work in c.best]
        if module == "ours" and not there:
            raise RuntimeError(f"ours: {wanted[0].reason}")
        return min(there, key=lambda c: c.best[work].wall / c.best[work].tokens) if there else wanted[0]

    def _value(self, work: str, contender: Contender) -> tuple[float, str]:
        best = contender.best[work]
        return (1000 * best.wall, "ms") if work == "first" else (best.tokens / best.wall, "tokens/s")

    def _agreement(self, work: str, best: Best) -> float:
        mine = next(c for c in self._field if c.variant == "fast float32").best[work]
        pairs = [(a, b) for x, y in zip(mine.ids, best.ids, strict=False) for a, b in zip(x, y, strict=False)]
        return round(sum(a == b for a, b in pairs) / max(1, len(pairs)), 3)

    def _print(self, contender: Contender, work: str) -> None:
        """Every contender's own figure, for whoever watches."""
        name = f"  {TITLES[work]:34} {NAMES[contender.module]:18} {contender.variant:22}"
        if work not in contender.best:
            print(name, contender.reason or "-", file=sys.stderr)
            return
        value, unit = self._value(work, contender)
        cpu = 1000 * _cpu(contender.best[work])
        print(f"{name} {value:8.1f} {unit:8} {cpu:8.3f} processor ms a token", file=sys.stderr)


def _cpu(best: Best) -> float:
    return best.cpu / best.tokens
