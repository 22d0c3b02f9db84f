"""What the commands of `riftco` share: options, how errors end, how a model is named, how work is shown."""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from artifacts import ModelBundle, Store, StoreError, TrainingCheckpoint
from artifacts.errors import refused_as
from artifacts.store import Progress
from riftco.errors import BackendUnavailableError, InputError, RankError, TrainingStopped
from riftco.log import log_to_terminal
from riftco.progress import show_progress

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be done.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="A YAML file of settings.", metavar="FILE")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="One setting, as a.b=value; may be repeated.", metavar="NAME=VALUE"),
]
Model = Annotated[
    str,
    typer.Argument(help="A .rift file, a name such as demo/pretrain, or an artifact id.", metavar="MODEL"),
]

_SMALLER = (
    "to train in less, lower batch_size, context_size, model_width or block_count; to serve in less, lower "
    "kv_cache_block_count or maximum_running, or set weights to nf4"
)


def print_json(value: Any) -> None:
    """JSON as the commands print it, indented; paths as texts."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows in aligned columns, each on one line and whole, however long, so that they can be piped on."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(map(str.ljust, row, widths)).rstrip())


@contextmanager
def user_errors(*, resumes: bool = True) -> Iterator[None]:
    """What the user can mend ends in one line on standard error and exit code 2, Ctrl-C in code 130.

    `resumes`: whether the same command would go on from where it was. A reader that has enough of our output,
    as `head` has, is no error. ValueError and OSError are for users here, as everywhere in the project;
    programmers' errors are others. That memory is out is seen by what torch says.
    """
    try:
        yield
    except (ValueError, BackendUnavailableError, RankError, TrainingStopped) as error:
        typer.echo(f"riftco: {error}", err=True)
        raise typer.Exit(2) from None
    except (MemoryError, RuntimeError) as error:
        said = str(error).partition("\n")[0]
        if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate memory", said):
            raise
        typer.echo(f"riftco: memory is out{said and f' ({said})'}; {_SMALLER}", err=True)
        raise typer.Exit(2) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails once more
        raise typer.Exit(0) from None
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        typer.echo(f"riftco: {what}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        hint = "; the same command goes on from what is finished" if resumes else ""
        typer.echo(f"\nriftco: interrupted{hint}", err=True)
        raise typer.Exit(130) from None


def names_a_file(name: str) -> bool:
    """Whether a model's name is that of a bundle's file rather than one in the store."""
    return name.endswith(".rift") or Path(name).is_file()


def open_bundle(name: str) -> ModelBundle:
    """The bundle of a file, or of a name in the store; StoreError, BundleError or InputError otherwise."""
    if names_a_file(name):
        refuse_checkpoint(name)
        return ModelBundle.load(name)
    with refused_as(StoreError, name):
        store = Store.open(create=False)
    return store.load_bundle(store.resolve(name))


def refuse_checkpoint(name: str) -> None:
    """Raise InputError for the file of a checkpoint where a model is needed."""
    if Path(name).is_file() and TrainingCheckpoint.is_at(name):
        remedy = (
            "give the command of its training again, which goes on from it, and take the bundle it writes"
        )
        raise InputError(f"{name}: is a checkpoint of a training, not a model; {remedy}")


@contextmanager
def show_work(title: str, *, size: bool = False) -> Iterator[Progress]:
    """Shows what is done of a number of things, or with `size` of bytes, as MiB."""
    log_to_terminal()
    scale, unit = (1 << 20, ", MiB") if size else (1, "")
    with show_progress() as report:

        def progress(done: int, total: int, what: str) -> None:
            report(f"{title}{unit}", done // scale, -(-total // scale), {})

        yield progress


def readable(size: float) -> str:
    """A number of bytes for people: `1.5 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
