"""Figures from outcomes: percentiles, rates, shares, and how they are shown."""

import io
import json
import re

import pytest
from rich.console import Console

from riftco.bench_serve.client import Outcome
from riftco.bench_serve.figure import figure
from riftco.bench_serve.summary import as_json, as_table, percentiles, summarize
from riftco.bench_serve.sweep import Level


def level(*outcomes: Outcome, planned: int | None = None) -> Level:
    numbered = dict(enumerate(outcomes))
    return Level(2, planned or len(outcomes), numbered, seconds=4.0, client_seconds=1.0)


GOOD = Outcome([0.1, 0.2, 0.4], seconds=0.5, text="abc", prompt_tokens=8, cached_tokens=6, new_tokens=3)
SLOW = Outcome([0.3, 0.4, 0.5], seconds=0.6, text="abd", prompt_tokens=8, cached_tokens=0, new_tokens=3)
FAILED = Outcome([0.1], seconds=9.0, new_tokens=1, error="HTTP 500: no")


def test_percentiles_interpolate() -> None:
    assert percentiles(n / 1000 for n in range(101)) == pytest.approx({"p50": 50, "p90": 90, "p99": 99})
    assert percentiles([0.002]) == pytest.approx({"p50": 2, "p90": 2, "p99": 2})
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}


def test_a_summary_counts_what_was_answered_and_nothing_else() -> None:
    found = summarize(level(GOOD, SLOW, FAILED, FAILED, planned=7))
    assert (found.requests, found.errors, found.planned, found.broken_off) == (2, {"HTTP 500: no": 2}, 7, 3)
    assert (found.requests_per_second, found.tokens_per_second) == (0.5, 1.5)
    assert (found.prompt_tokens, found.cached_tokens, found.new_tokens) == (16, 6, 6)
    assert found.first_token_ms["p50"] == pytest.approx(200)
    assert found.inter_token_ms["p50"] == pytest.approx(100)
    assert found.end_to_end_ms["p50"] == pytest.approx(550)
    assert found.client_share == 0.25
    assert found.differing is None


def test_answers_are_compared_with_those_to_the_same_prompts() -> None:
    assert summarize(level(GOOD, SLOW), level(GOOD, GOOD)).differing == 1
    assert summarize(level(GOOD, SLOW), level(GOOD, SLOW)).differing == 0
    assert summarize(level(SLOW, FAILED), level(FAILED, GOOD)).differing == 0, "a failure is no answer"


def test_all_figures_are_in_the_table_and_the_json() -> None:
    summaries = [summarize(level(GOOD, SLOW, FAILED)), summarize(level(FAILED), level(FAILED))]
    output = io.StringIO()
    Console(file=output, width=80).print(as_table(summaries))
    rows = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in output.getvalue().splitlines())
    cells = {name: re.split(r"\s{2,}", text.strip()) for name, text in rows.items()}
    assert cells["answered"] == ["2/3", "0/1"]
    assert cells["of these cached"] == ["38 %", "-"]
    assert cells["first token, p50"] == ["200.0 ms", "-"]
    assert cells["answers that differ"] == ["-", "0"]
    values = json.loads(json.dumps(as_json(summaries), allow_nan=False))
    assert [value["end_to_end_ms"]["p99"] for value in values] == [pytest.approx(599), None]


def test_the_figure_is_a_png_of_these_numbers() -> None:
    one = figure([summarize(level(GOOD)), summarize(level(FAILED))], "title")
    assert one.startswith(b"\x89PNG")
    assert figure([summarize(level(SLOW)), summarize(level(FAILED))], "title") != one
