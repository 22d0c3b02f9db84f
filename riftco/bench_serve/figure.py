"""The figure: latencies and throughput over the number of requests in flight."""

import io
from collections.abc import Sequence

from riftco.bench_serve.summary import LATENCIES, PERCENTILES, Summary


def figure(summaries: Sequence[Summary], title: str) -> bytes:
    """A PNG of three panels: first token, time between tokens, throughput."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    at = [summary.concurrency for summary in summaries]
    picture = Figure(figsize=(12, 4), layout="constrained")
    first, between, throughput = picture.subplots(1, 3)
    for axes, field in ((first, "first_token_ms"), (between, "inter_token_ms")):
        for percentile in PERCENTILES:
            values = [getattr(summary, field)[f"p{percentile}"] for summary in summaries]
            heights = [float("nan") if value is None else value for value in values]
            axes.plot(at, heights, "o-", label=f"p{percentile}", markersize=4, linewidth=1.2)
        axes.set(title=LATENCIES[field], ylabel="ms", ylim=(0, None))
        axes.legend()
    throughput.plot(
        at, [summary.tokens_per_second for summary in summaries], "o-", markersize=4, linewidth=1.2
    )
    throughput.set(title="throughput", ylabel="new tokens/s", ylim=(0, None))
    for axes in (first, between, throughput):
        axes.set(xlabel="requests in flight", xscale="log", xticks=at)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    picture.suptitle(title)
    image = io.BytesIO()
    picture.savefig(image, format="png", dpi=120, metadata={"Software": None})
    return image.getvalue()
