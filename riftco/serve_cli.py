"""The commands of `riftco` that run a model: `generate`, `serve`, and `key` for whoever may ask a server."""

import math
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from artifacts import ModelBundle
from riftco.commands import (
    Assignments,
    ConfigFile,
    Model,
    names_a_file,
    open_bundle,
    refuse_checkpoint,
    user_errors,
)
from riftco.config import ServingConfig
from riftco.data.text import decode_utf8, universal_newlines
from riftco.errors import InputError
from riftco.settings import load_config

_GIBIBYTE = 1 << 30
Weights = Literal["float32", "bfloat16", "int8", "nf4"]


def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - or none in a pipe reads standard input.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among the k likeliest only.")] = None,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest that reach this share.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the chat template of post-training.")] = False,
    echo: Annotated[bool, typer.Option("--echo/--no-echo", help="Print the prompt before the text.")] = True,
) -> None:
    """Continue a prompt, or answer it with --chat, as the text is made.

    Examples: `riftco generate demo/post-train --chat "Mara was in the barn. Where is Mara now?"`,
    `riftco generate book.rift --no-echo < beginning.txt > rest.txt`
    """
    with user_errors(resumes=False):
        if not temperature and (top_k is not None or top_p != 1):
            raise InputError("--top-k and --top-p need a --temperature above 0")
        prompt = _prompt(prompt)
        bundle = open_bundle(model)
        from riftco.chat_template import ChatMessage
        from riftco.serving import ModelService
        from riftco.serving.engine import GenerationRequest, SamplingParams
        from riftco.serving.engine import generate as events

        with ModelService(bundle, ServingConfig(maximum_running=1)) as service:
            text, stops, before = prompt, tuple(stop or ()), prompt if echo else ""
            if chat:
                text, before = service.template.render([ChatMessage("user", prompt)]), ""
                stops += service.template.stop
            sampling = SamplingParams(temperature, top_k, top_p, seed=seed)
            prompt_ids, context = service.prompt_ids(text), service.maximum_context
            if len(prompt_ids) > context:
                note = (
                    f"the prompt has {len(prompt_ids)} tokens; the model's context holds the last {context}"
                )
                typer.echo(f"riftco: {note}", err=True)
            request = GenerationRequest(prompt_ids, max_new_tokens, sampling, stop=stops)
            for event in events(service.engine, request):
                if event.error is not None:
                    raise RuntimeError(event.error)
                typer.echo(before + event.text, nl=False)
                before = ""
        typer.echo()


def _prompt(given: str | None) -> str:
    """The prompt as given, or what standard input holds."""
    if given not in (None, "-"):
        return given
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("give a prompt, or pipe one in: riftco generate MODEL < prompt.txt")
    return universal_newlines(decode_utf8(sys.stdin.buffer.read(), source="standard input"))


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            help="A .rift file, a name such as demo/post-train, or an artifact id; NAME=MODEL names it for "
            "clients. The first is the default.",
            metavar="MODEL...",
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")] = 8000,
    weights: Annotated[
        Weights | None,
        typer.Option(help="What linear weights are held as: int8 takes a quarter, nf4 a 7th."),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="File of API keys, made by `riftco key`.", metavar="FILE")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="What models may take together; the least recently used make room.", metavar="GIB"
        ),
    ] = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
) -> None:
    """Serve models over HTTP until Ctrl-C: a chat page at `/`, and OpenAI's API under `/v1`.

    Beyond this machine (`--host 0.0.0.0`) only with API keys.

    Examples: `riftco serve demo/post-train`, `riftco serve small=a.rift large=b.rift --weights nf4`
    """
    with user_errors():
        if memory is not None and not math.isfinite(memory):
            raise InputError(f"--memory {memory}: give a number of GiB")
        if weights is not None:
            assignments = [*(assignments or ()), f"weights={weights}"]
        settings = load_config(ServingConfig(), config, assignments or ())
        found = [_found(model) for model in models]
        sources = {name: source for name, source, _ in found}
        if len(sources) < len(models):
            raise InputError("two models have the same name; name them NAME=MODEL")
        from riftco.serving import serve as serve_bundles
        from riftco.serving.http.access import Access

        def ready(url: str) -> None:
            names = ", ".join(f"{name} ({artifact_id[:10]})" for name, _, artifact_id in found)
            typer.echo(f"Serving {names} at {url}  (Ctrl-C stops)")

        serve_bundles(
            sources,
            host=host,
            port=port,
            config=settings,
            ready=ready,
            access=None if keys is None else Access.from_file(keys),
            memory_bytes=None if memory is None else int(memory * _GIBIBYTE),
        )


def key(
    name: Annotated[str, typer.Argument(help="Whose key it is: letters, digits, `.`, `_` and `-`.")],
    file: Annotated[Path, typer.Option(help="Key file to add it to; created if absent.", metavar="FILE")],
    concurrent: Annotated[int | None, typer.Option(min=1, help="Requests at one time.")] = None,
    per_minute: Annotated[int | None, typer.Option(min=1, help="Requests a minute.")] = None,
) -> None:
    """Make an API key for `riftco serve --keys FILE` and print it, once: the file keeps only its hash.

    Example: `riftco key alice --file keys.txt --concurrent 4 --per-minute 60`
    """
    with user_errors():
        from riftco.serving.http.access import Access, new_key

        if file.exists() and name in {known.name for known in Access.from_file(file).keys}:
            raise InputError(f"{file}: {name} has a key already; remove that line to replace it")
        secret, line = new_key(name)
        limits = {"concurrent": concurrent, "per_minute": per_minute}
        line += "".join(f" {limit}={value}" for limit, value in limits.items() if value is not None)
        with file.open("a+", encoding="utf-8") as output:
            output.seek(0)
            before = output.read()
            output.write(("\n" if before and not before.endswith("\n") else "") + f"{line}\n")
        typer.echo(secret)


def _found(text: str) -> tuple[str, ModelBundle | Path, str]:
    """A model's name for clients, where it is loaded from, and its artifact id.

    A file is read, whole, each time that its model is loaded: it may be another one by then.
    """
    name, equals, model = text.partition("=")
    if not equals or Path(text).is_file():
        name, model = Path(text).stem if text.endswith(".rift") else text, text
    if names_a_file(model):
        refuse_checkpoint(model)
        return name, Path(model), ModelBundle.identify(model)
    bundle = open_bundle(model)
    return name, bundle, bundle.artifact_id
