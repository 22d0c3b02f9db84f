"""The model commands of `riftco`: what works on files and bundles, without flows.

Heavy imports happen inside the commands, so that `--help` answers at once.
"""

import hashlib
import importlib.metadata
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from artifacts import (
    BundleError,
    ModelBundle,
    Ref,
    Store,
    TrainingCheckpoint,
    Workspace,
    step_key,
    write_atomic,
)
from riftco.bench_cli import bench_serve
from riftco.commands import Assignments, ConfigFile, Model, open_bundle, print_json, readable, user_errors
from riftco.config import OPERATION, PostTrainingConfig, PretrainingConfig, ServingConfig
from riftco.data import read_corpus, read_text
from riftco.errors import InputError
from riftco.exclusive import exclusive
from riftco.interchange_cli import convert
from riftco.lineage_cli import diff, lineage, why
from riftco.log import LOGGER, log_to_terminal
from riftco.progress import show_progress
from riftco.serve_cli import generate, key, serve
from riftco.settings import load_config, settings_help
from riftco.store_cli import show_stored, small_json, store_app, verify_names

if TYPE_CHECKING:
    from riftco.training.tracking import RunTracker

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="From raw text and instruction data to a served small language model.",
)

app.add_typer(store_app, name="store")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"riftco {importlib.metadata.version('riftco')}")
        raise typer.Exit


@app.callback()
def _riftco(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    pass


_ANSWERS: dict[str, Any] = {"sampling_strategy": "document_rows", "loss_scope": "response_only"}
"""What `tune` sets if the user does not: whole examples, whose responses are learned."""

Output = Annotated[Path, typer.Option("--output", "-o", help="Bundle to write.", metavar="FILE.rift")]


@app.command(epilog=settings_help(PretrainingConfig))
def pretrain(
    text: Annotated[
        Path, typer.Argument(help="UTF-8 text to learn: a file, or a folder of .txt files.", metavar="TEXT")
    ],
    output: Output,
    validation: Annotated[
        Path | None, typer.Option(help="Text to validate on, likewise; else the end of TEXT.")
    ] = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
) -> None:
    """Train a new model on text and write its bundle.

    Example: `riftco pretrain book.txt -o book.rift -s steps=500 -s model_width=64 -s context_size=64`
    """
    with user_errors():
        settings = load_config(PretrainingConfig(), config, assignments or ())
        _check_output(output, text, validation)
        from riftco.training import pretrain_splits, pretrain_text

        learned, *held_out = (read_corpus(path) for path in (text, validation) if path is not None)
        with _training("pretrain", settings, output, [learned, *held_out]) as (sink, workspace):
            if not held_out:
                result = pretrain_text(learned, settings, metric_sink=sink, workspace=workspace)
            else:
                result = pretrain_splits(
                    learned, held_out[0], settings, metric_sink=sink, workspace=workspace
                )
            _saved(result.bundle, output, result.metrics[-1].loss)


@app.command(epilog=settings_help(PostTrainingConfig, context_size="the model's", **_ANSWERS))
def tune(
    model: Model,
    instructions: Annotated[Path, typer.Argument(help="JSONL with prompt and response.", metavar="JSONL")],
    output: Output,
    validation: Annotated[
        Path | None, typer.Option(help="JSONL held out: its loss is shown on the way.", metavar="JSONL")
    ] = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
) -> None:
    """Fine-tune a model on prompts and responses, in full or through LoRA, and write the new bundle.

    Unless set otherwise, each row is a whole example in the model's own context, and responses alone are
    learned.

    Example: `riftco tune book.rift chats.jsonl -o chat.rift -s fine_tuning_method=lora -s lora.rank=8`
    """
    with user_errors():
        _check_output(output, Path(model), instructions, validation)
        base = open_bundle(model)
        defaults = PostTrainingConfig(
            context_size=base.config.maximum_context, sampling_strategy="document_rows"
        )
        settings = load_config(defaults, config, assignments or ())
        if not settings.sampling_strategy.endswith("_uniform"):  # which cuts responses from their prompts
            defaults = defaults.model_copy(update=_ANSWERS)
            settings = load_config(defaults, config, assignments or ())
        from riftco.training import post_train_jsonl

        inputs = [base.artifact_id, *(read_text(path) for path in (instructions, validation) if path)]
        with _training("tune", settings, output, inputs) as (sink, workspace):
            result = post_train_jsonl(
                base,
                instructions,
                settings,
                validation_path=validation,
                metric_sink=sink,
                workspace=workspace,
            )
            _saved(result.bundle, output, result.metrics[-1].loss)


app.command()(generate)
app.command(epilog=settings_help(ServingConfig))(serve)
app.command()(key)
app.command()(bench_serve)


@app.command()
def show(
    name: Annotated[
        str | None, typer.Argument(help="A bundle, checkpoint, run or result; all runs without it.")
    ] = None,
) -> None:
    """Show what a bundle, a checkpoint, a run or a stored result is, and the scores of a stage.

    Examples: `riftco show`, `riftco show demo`, `riftco show demo/pretrain`, `riftco show model.rift`
    """
    with user_errors():
        if name is not None and Path(name).is_file():
            checkpoint = TrainingCheckpoint.load(name) if TrainingCheckpoint.is_at(name) else None
            print_json(_state_facts(checkpoint) if checkpoint else _model_facts(ModelBundle.load(name)))
            return
        store = Store.open(create=False)
        run = store.run_called(name) if name is not None else None
        if name is None or run is not None:
            _show_runs(store, store.runs() if run is None else [run])
            return
        ref = store.resolve(name)
        if ref.kind == "bundle":
            scores = _scores(store, store.objects_of(name))
            print_json(_model_facts(store.load_bundle(ref)) | ({"scores": scores} if scores else {}))
        else:
            show_stored(store, ref)


@app.command()
def verify(
    names: Annotated[
        list[str], typer.Argument(help="Bundles, checkpoints, runs or results to check.", metavar="NAME...")
    ],
) -> None:
    """Check bundles, checkpoints and stored results by their ids and hashes; exit code 2 if one is wrong."""
    with user_errors():
        verify_names(names, files=True)


for command in (lineage, why, diff, convert):
    app.command()(command)


@contextmanager
def _training(
    title: str, settings: PretrainingConfig | PostTrainingConfig, output: Path, inputs: list[str]
) -> "Iterator[tuple[RunTracker | None, Workspace]]":
    """The metric sink of a training and where it keeps its state, both in the folder `OUTPUT.run`.

    A run that was stopped goes on if settings and inputs are the same; one whose bundle is written, which is
    to be done inside, leaves no state but the table and samples, and one that was refused nothing. Of ranks
    that share a run only the leader has a sink.
    """
    from riftco.training.ranks import is_leader
    from riftco.training.tracking import open_tracking

    folder = output.with_name(f"{output.name}.run")
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in inputs]
    recipe = {"config": settings.model_dump(mode="json", exclude=set(OPERATION)), "inputs": digests}
    workspace = Workspace(folder / step_key(title, 1, recipe)[:16])
    log_to_terminal()
    if not is_leader():
        yield None, workspace
        return
    waiting = f"{output}: another process is training the same; waiting"
    try:
        with (
            exclusive(folder / f"{workspace.folder.name}.lock", lambda: LOGGER.info(waiting)),
            show_progress() as report,
            open_tracking(settings, run=output.stem, folder=folder, report=partial(report, title)) as sink,
        ):
            yield sink, workspace
            workspace.clear()
            _tell_of_unfinished(folder)
    finally:
        for unused in (workspace.folder, folder):
            with suppress(OSError):  # there is something in it
                unused.rmdir()


def _tell_of_unfinished(folder: Path) -> None:
    """Say in the log what else lies in a finished run's folder; it is not ours to delete."""
    with suppress(FileNotFoundError):  # one that is at work replaces its files
        states = {path.parent for path in folder.glob("*/*.riftckpt")}
        size = sum(path.stat().st_size for state in states for path in state.iterdir())
        if states:
            runs = f"{len(states)} unfinished run{'s' * (len(states) > 1)}"
            unfinished = f"{runs} of other settings or inputs, {readable(size)}"
            advice = "to go on with one give its command again, else the folder may be deleted"
            LOGGER.info("%s also keeps %s: %s", folder, unfinished, advice)


def _check_output(output: Path, *inputs: Path | None) -> None:
    """Refuse, before any work, an output that could not be written or would replace what is no bundle."""
    if output.is_dir():
        raise InputError(f"{output}: is a folder; give the name of a file to write")
    if any(path is not None and output.resolve() == path.resolve() for path in inputs):
        raise InputError(f"{output}: is also an input, which would be lost; give another name")
    if output.exists():
        try:
            ModelBundle.identify(output)
        except (BundleError, FileNotFoundError):  # the latter for a device
            raise InputError(f"{output}: is no bundle and would be lost; give another name") from None
    existing = next(parent for parent in output.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"{output}: cannot be written, {existing} is not a folder we may write to")


def _saved(bundle: ModelBundle, output: Path, loss: float) -> None:
    from riftco.training.ranks import is_leader

    if not is_leader():
        return
    try:
        write_atomic(output, bundle.chunks(), sync=True)  # the state that is cleared next cannot come back
    except OSError as error:
        raise InputError(
            f"{output}: {error.strerror or error}; free some space and give the command again"
        ) from None
    typer.echo(f"{output}: {bundle.stage}, loss {loss:.4f}, artifact {bundle.artifact_id}")


def _model_facts(bundle: ModelBundle) -> dict[str, Any]:
    return {
        "artifact_id": bundle.artifact_id,
        "parent_artifact_id": bundle.parent_artifact_id,
        "stage": bundle.stage,
        "parameters": sum(spec.count for spec in bundle.parameters),
        "config": asdict(bundle.config),
        "tokenizer": f"{bundle.tokenizer.method}, {bundle.tokenizer.vocabulary_size} entries",
        "metadata": bundle.metadata,
    }


def _state_facts(checkpoint: TrainingCheckpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "global_step": checkpoint.global_step,
        "parameters": sum(spec.count for spec in checkpoint.parameters),
        "trained_parameters": sum(spec.count for spec in checkpoint.trained_parameters),
        "config": asdict(checkpoint.config),
        "lora": asdict(checkpoint.lora) if checkpoint.lora else None,
        "optimizer": asdict(checkpoint.optimizer),
        "metadata": checkpoint.metadata,
    }


def _scores(store: Store, results: Iterable[Ref]) -> dict[str, Any]:
    """The scores among a stage's results; empty without."""
    return next(filter(None, (small_json(store, ref) for ref in results if ref.kind == "scores")), {})


def _show_runs(store: Store, runs: list[str]) -> None:
    for run in runs:
        for stage, made in store.run_stages(run).items():
            results = ", ".join(f"{name} {ref.digest[:12]}" for name, ref in made.record.results.items())
            typer.echo(f"{run}/{stage}: {results}  ({made.record.seconds:.1f} s)")
            for name, score in _scores(store, made.record.results.values()).items():
                typer.echo(f"    {name} {score}")
    if not runs:
        typer.echo(f"no runs in {store.root}")
