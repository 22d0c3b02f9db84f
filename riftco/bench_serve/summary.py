"""From outcomes to percentiles, as numbers and as a table."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from riftco.bench_serve.sweep import Level

PERCENTILES = (50, 90, 99)
LATENCIES = {
    "first_token_ms": "first token",
    "inter_token_ms": "between tokens",
    "end_to_end_ms": "end to end",
}
"""Fields of a summary that hold percentiles, and what people call them."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One level. Latencies are milliseconds by percentile (`p50`); None where nothing was measured."""

    concurrency: int
    requests: int
    """That were answered; those that failed are in `errors`, those broken off nowhere."""
    planned: int
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    """New ones, of all requests together."""
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    first_token_ms: dict[str, float | None]
    inter_token_ms: dict[str, float | None]
    """Gaps between pieces of text; a server sends one per token, or fewer."""
    end_to_end_ms: dict[str, float | None]
    differing: int | None
    """Answers that are not those of the first level to the same prompts; None where prompts differ."""
    client_share: float
    """Of one core that measuring took; near 1, the figures are the client's."""
    errors: dict[str, int]

    @property
    def broken_off(self) -> int:
        """Requests that were never answered because the run was interrupted."""
        return self.planned - self.requests - sum(self.errors.values())


def summarize(level: Level, reference: Level | None = None) -> Summary:
    """The summary of a level; `reference` is the level whose answers its own should equal."""
    good = {number: o for number, o in level.outcomes.items() if o.error is None}
    seconds = max(level.seconds, 1e-9)
    new_tokens = sum(outcome.new_tokens for outcome in good.values())
    differing = None
    if reference is not None:
        pairs = ((o.text, reference.outcomes.get(number)) for number, o in good.items())
        differing = sum(
            other is not None and other.error is None and other.text != text for text, other in pairs
        )
    return Summary(
        concurrency=level.concurrency,
        requests=len(good),
        planned=level.requests,
        seconds=level.seconds,
        requests_per_second=len(good) / seconds,
        tokens_per_second=new_tokens / seconds,
        prompt_tokens=sum(outcome.prompt_tokens for outcome in good.values()),
        cached_tokens=sum(outcome.cached_tokens for outcome in good.values()),
        new_tokens=new_tokens,
        first_token_ms=percentiles(o.arrivals[0] for o in good.values() if o.arrivals),
        inter_token_ms=percentiles(gap for o in good.values() for gap in o.gaps),
        end_to_end_ms=percentiles(o.seconds for o in good.values()),
        differing=differing,
        client_share=level.client_seconds / seconds,
        errors=dict(Counter(o.error for o in level.outcomes.values() if o.error is not None)),
    )


def percentiles(seconds: Iterable[float]) -> dict[str, float | None]:
    """Milliseconds at each of `PERCENTILES`, interpolated; None of no values."""
    values = list(seconds)
    points = np.percentile(values, PERCENTILES) * 1000 if values else [None] * len(PERCENTILES)
    return {
        f"p{at}": None if point is None else float(point)
        for at, point in zip(PERCENTILES, points, strict=True)
    }


def as_json(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """Plain JSON, a mapping for each level."""
    return [asdict(summary) for summary in summaries]


def as_table(summaries: Sequence[Summary]) -> Table:
    """A column for each level, a row for each figure."""
    table = Table("requests in flight", box=None, pad_edge=False, header_style="bold")
    for summary in summaries:
        table.add_column(str(summary.concurrency), justify="right")

    def row(name: str, cells: Iterable[str]) -> None:
        table.add_row(name, *cells)

    row("answered", (f"{s.requests}/{s.planned}" for s in summaries))
    row("failed", (str(sum(s.errors.values())) for s in summaries))
    row("seconds", (f"{s.seconds:.1f}" for s in summaries))
    row("requests/s", (f"{s.requests_per_second:,.1f}" for s in summaries))
    row("new tokens/s", (f"{s.tokens_per_second:,.0f}" for s in summaries))
    row("prompt tokens", (f"{s.prompt_tokens:,}" for s in summaries))
    row("of these cached", (_percent(s.cached_tokens, s.prompt_tokens) for s in summaries))
    for name, title in LATENCIES.items():
        for at in PERCENTILES:
            row(f"{title}, p{at}", (_milliseconds(getattr(s, name)[f"p{at}"]) for s in summaries))
    if any(s.differing is not None for s in summaries):
        row("answers that differ", ("-" if s.differing is None else str(s.differing) for s in summaries))
    row("client, of a core", (f"{100 * s.client_share:.0f} %" for s in summaries))
    return table


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"
