"""`riftco bench-serve`: how a server does under load, as its clients see it."""

import asyncio
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from riftco.commands import Json, print_json, user_errors
from riftco.errors import InputError
from riftco.progress import ReportProgress, show_progress

if TYPE_CHECKING:
    from riftco.bench_serve.load import Load
    from riftco.bench_serve.summary import Summary
    from riftco.bench_serve.sweep import Level, Server


def bench_serve(
    target: Annotated[
        str,
        typer.Argument(
            help="URL of a running server, or a .rift file or name in the store to serve meanwhile.",
            metavar="URL|MODEL",
        ),
    ],
    concurrency: Annotated[
        str, typer.Option("--concurrency", "-c", help="Requests in flight; several levels as 1,4,16.")
    ] = "1,4,16",
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="Requests at each level.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    shared: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of each prompt that is the same in all, from its start."),
    ] = 0.0,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each.")] = 32,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts and of sampling.")] = 0,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Same prompts at each level (cached after the first); exit 1 if an answer differs.",
        ),
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="The server's name for the model; its first by default.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Sent as a bearer token.", envvar="RIFTCO_API_KEY")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds of silence that fail a request.")] = 120.0,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", help="A setting of the server for MODEL, as name=value.", metavar="NAME=VALUE"
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Write a figure here.", metavar="FILE.png")] = None,
    as_json: Json = False,
) -> None:
    """Measure a server under load: first token, time between tokens, end to end, throughput.

    For each level, so many requests are kept in flight until all are answered; Ctrl-C shows what was measured
    until then. Works with any server that streams OpenAI's `/v1/completions`. Prompts are random: token ids
    where the server is riftco's, words elsewhere. A first request is sent before the clock runs.

    A server is started, measured and stopped; settings are those of `riftco serve`:

        riftco bench-serve demo/post-train
        riftco bench-serve model.rift -c 1,16 -s mode=fast --png load.png

    One that runs, ours or another:

        riftco bench-serve http://127.0.0.1:8000 -c 1,4,16 --prompt-tokens 192 --shared 0.75
        riftco bench-serve https://example.org --model small --api-key $KEY --json > load.json

    Do answers depend on the load? None may:

        riftco bench-serve model.rift -c 1,8,32 --temperature 0.8 --verify
    """
    with user_errors(resumes=False), ExitStack() as stack:
        levels_of_load = _levels(concurrency)
        if max(levels_of_load) > requests:
            most = max(levels_of_load)
            raise InputError(f"--requests {requests} cannot keep {most} in flight; give at least {most}")
        if verify and len(levels_of_load) < 2:
            raise InputError("--verify compares levels; give --concurrency at least two, such as 1,8")
        if png is not None and not png.absolute().parent.is_dir():
            raise InputError(f"{png}: its folder does not exist")
        is_url = target.startswith(("http://", "https://"))
        if is_url:
            urlsplit(target).port  # noqa: B018 # ValueError for one that cannot be
        if is_url and assignments:
            raise InputError("--set is for a server that this command starts; a running one has its settings")
        from riftco.bench_serve.load import Load
        from riftco.bench_serve.own_server import own_server
        from riftco.bench_serve.sweep import Server

        load = Load(requests, prompt_tokens, shared, new_tokens, temperature, seed, same_prompts=verify)
        url = target if is_url else stack.enter_context(own_server(target, assignments or ()))
        levels: list[Level] = []
        interrupted = _measured(Server(url, model, api_key, timeout), load, levels_of_load, levels)
        summaries = _summaries(levels, verify)
        if not summaries:
            typer.echo("riftco: interrupted before anything was answered", err=True)
            raise typer.Exit(130)
        _print(summaries, load, target, as_json)
        if png is not None:
            from riftco.bench_serve.figure import figure

            png.write_bytes(figure(summaries, f"{target}: {_described(load)}"))
        if interrupted:
            typer.echo("riftco: interrupted; these are the requests answered until then", err=True)
            raise typer.Exit(130)
        if any(summary.errors or summary.differing for summary in summaries):
            raise typer.Exit(1)


def _measured(server: "Server", load: "Load", concurrencies: list[int], levels: "list[Level]") -> bool:
    """Fill `levels`; returns whether Ctrl-C ended it."""
    from riftco.bench_serve.sweep import sweep

    with show_progress() as report:
        try:
            asyncio.run(sweep(server, load, concurrencies, levels, lambda level: _report(report, level)))
        except KeyboardInterrupt:
            return True
    return False


def _report(report: ReportProgress, level: "Level") -> None:
    numbers: dict[str, float] = {"tokens_per_second": level.new_tokens / max(level.seconds, 1e-9)}
    if level.failed:
        numbers["failed"] = level.failed
    report(f"{level.concurrency} in flight", len(level.outcomes), level.requests, numbers)


def _summaries(levels: "list[Level]", verify: bool) -> "list[Summary]":
    """Of the levels in which anything was answered."""
    from riftco.bench_serve.summary import summarize

    first = levels[0] if levels and verify else None
    return [summarize(level, first) for level in levels if level.outcomes]


def _print(summaries: "list[Summary]", load: "Load", target: str, as_json: bool) -> None:
    from dataclasses import asdict

    from riftco.bench_serve.summary import as_json as plain
    from riftco.bench_serve.summary import as_table

    if as_json:
        facts: dict[str, Any] = {"target": target, "load": asdict(load), "levels": plain(summaries)}
        print_json(facts)
        return
    from rich.console import Console

    console = Console(file=sys.stdout)
    console.print(f"{target}: {_described(load)}", markup=False, highlight=False)
    console.print(as_table(summaries))
    for summary in summaries:
        for error, count in summary.errors.items():
            typer.echo(f"{summary.concurrency} in flight, {count} failed: {error}", err=True)


def _described(load: "Load") -> str:
    shared = f", {100 * load.shared:.0f} % shared" if load.shared else ""
    return f"prompts of {load.prompt_tokens} tokens{shared}, {load.new_tokens} new tokens"


def _levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1:
        raise InputError(f"--concurrency {text}: give numbers of at least 1, such as 1,4,16")
    return levels
