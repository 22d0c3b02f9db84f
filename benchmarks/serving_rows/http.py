"""What a client sees through HTTP: the load of `riftco bench-serve` on a server of its own."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Row, row
from benchmarks.serving_peers.work import WORKS
from riftco.bench_serve.load import Load
from riftco.bench_serve.own_server import own_server
from riftco.bench_serve.summary import Summary, summarize
from riftco.bench_serve.sweep import Level, Server, sweep


def rows(path: Path, threads: int, quick: bool) -> Iterator[Row]:
    """One request in flight and sixteen, with prompts and answers as long as in the speed rows."""
    work = WORKS["sixteen"]
    load = Load(requests=16 if quick else 64, prompt_tokens=work.prompt, new_tokens=work.new)
    settings = ("backend=cpu", "mode=fast", f"threads={threads}")
    levels: list[Level] = []
    with own_server(str(path), settings) as url:
        asyncio.run(sweep(Server(url), load, (1, 16), levels, lambda _: None))
    for level in levels:
        yield _row(summarize(level))


def _row(summary: Summary) -> Row:
    if summary.errors:
        raise RuntimeError(f"requests failed: {summary.errors}")
    latencies = {
        f"{name}_{at}": round(value, 2)
        for name in ("first_token_ms", "inter_token_ms")
        for at, value in getattr(summary, name).items()
    }
    title = f"over HTTP, {summary.concurrency} in flight, fast float32"
    speed, share = summary.tokens_per_second, round(summary.client_share, 2)
    reason = "the same row without HTTP is above"
    return row(title, speed, "tokens/s", "-", None, None, reason=reason, client_share=share, **latencies)
