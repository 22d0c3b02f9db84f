"""The `riftco` command: the model commands of `riftco.cli`, and those that run or plan a flow.

Prefect and torch are imported inside the commands, so that `--help` and `plan` are quick.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from artifacts import Store, write_atomic
from riftco.cli import app
from riftco.commands import Assignments, ConfigFile, user_errors
from riftco.config import FinetuneFlowConfig, PipelineConfig, PretrainFlowConfig
from riftco.settings import load_config, settings_yaml

if TYPE_CHECKING:
    from flows.dag import FlowConfig
    from tasks.call import Results
    from tasks.plan import PlanRunner

run_app = typer.Typer(no_args_is_help=True, help="Run a flow; a local Prefect server comes and goes with it.")
app.add_typer(run_app, name="run")
Stage = Annotated[list[str] | None, typer.Option("--force", help="Run this stage again; may be repeated.")]
FromStage = Annotated[str | None, typer.Option("--from-stage", help="Run this stage and all after it again.")]
RUNS = Path("runs")
Flow = Literal["pipeline", "pretrain", "finetune"]
_DEFAULTS: dict[Flow, "FlowConfig"] = {
    "pipeline": PipelineConfig(),
    "pretrain": PretrainFlowConfig(),
    "finetune": FinetuneFlowConfig(),
}


def _all_settings(flow: Flow) -> str:
    return f"All settings and their values: `riftco plan {flow} --settings`"


@run_app.command("pipeline", epilog=_all_settings("pipeline"))
def run_pipeline(
    config: ConfigFile = None,
    assignments: Assignments = None,
    force: Stage = None,
    from_stage: FromStage = None,
) -> None:
    """Raw text to a served model: corpus, tokenizer, pretraining, tuning, LoRA ranks, serving, report.

    Every finished step is kept in the store under a key made of all it depends on, and is skipped the next
    time. A run that was stopped goes on from there: give the same command again.

    The defaults learn the built-in micro-world in minutes. Your own data:

        riftco run pipeline --set name=plays --set corpus.path=plays.txt --set instructions.path=tasks.jsonl
    """
    _run("pipeline", config, assignments, force, from_stage)


@run_app.command("pretrain", epilog=_all_settings("pretrain"))
def run_pretrain(
    config: ConfigFile = None,
    assignments: Assignments = None,
    force: Stage = None,
    from_stage: FromStage = None,
) -> None:
    """Raw text to a new model: corpus, tokenizer, pretraining, stories.

    Example: `riftco run pretrain -s name=plays -s corpus.path=plays.txt -s pretraining.steps=2000`
    """
    _run("pretrain", config, assignments, force, from_stage)


@run_app.command("finetune", epilog=_all_settings("finetune"))
def run_finetune(
    config: ConfigFile = None,
    assignments: Assignments = None,
    force: Stage = None,
    from_stage: FromStage = None,
) -> None:
    """A model and instructions to a tuned one: tuning, answers to held-out questions, serving.

    Example: `riftco run finetune -s name=chat -s base=plays/pretrain -s instructions.path=tasks.jsonl
    -s post_training.fine_tuning_method=qlora -s post_training.optimizer=adamw`
    """
    _run("finetune", config, assignments, force, from_stage)


@app.command()
def plan(
    flow: Annotated[Flow, typer.Argument(help="Which flow.")] = "pipeline",
    config: ConfigFile = None,
    assignments: Assignments = None,
    only_settings: Annotated[
        bool, typer.Option("--settings", help="Only list all settings, as YAML that `-c` takes back.")
    ] = False,
) -> None:
    """Say what `run` would do with the same settings, and why, without doing it.

    Every setting and its value: `riftco plan pretrain --settings`
    """
    with user_errors():
        settings = load_config(_DEFAULTS[flow], config, assignments or ())
        if only_settings:
            typer.echo(settings_yaml(settings), nl=False)
            return
        runner = _plan(flow, Store.preview(), settings)
        table = Table("stage", "status", "why", box=None)
        for stage in runner.stages:
            table.add_row(stage.stage, stage.status, stage.reason)
        console = Console()
        console.print(table)
        waiting = sum(stage.status != "cached" for stage in runner.stages)
        console.print(f"{len(runner.stages) - waiting} of {len(runner.stages)} stages are up to date")


def _run(
    flow: Flow,
    config: Path | None,
    assignments: list[str] | None,
    force: list[str] | None,
    from_stage: str | None,
) -> None:
    from flows.local_server import local_prefect

    with user_errors():
        settings = load_config(_DEFAULTS[flow], config, assignments or ())
        store = Store.open()
        planned = _plan(flow, store, settings)  # what is wrong is told before a server is started
        planned.require_stages([*(force or ()), *([from_stage] if from_stage else [])])
        with local_prefect():
            run = getattr(import_module(f"flows.{flow}"), flow)
            made = run(settings, tuple(force or ()), from_stage)
        _lay_out(store, settings.name, made)


def _plan(flow: Flow, store: Store, settings: "FlowConfig") -> "PlanRunner":
    """The plan of a run; bad input is an InputError."""
    from flows import dag
    from tasks.plan import PlanRunner

    sources = dag.Sources.read(settings, store, put=False)
    with PlanRunner(store, settings.name) as runner:
        getattr(dag, f"{flow}_dag")(settings, sources)
    return runner


def _lay_out(store: Store, run: str, made: dict[str, "Results"]) -> None:
    """Put report and picture under `runs/<run>`, print the one, and list every result with its path.

    Says so when the run's name means other results by now, as after another run of the same name.
    """
    folder = RUNS / run
    results = {name: ref for refs in made.values() for name, ref in refs.items()}
    files = {"report": "report.md", "plot": "loss.png"}
    for name, file in files.items():
        if name in results:
            write_atomic(folder / file, store.read_bytes(results[name]))
    if "report" in results:
        Console().print(Markdown(store.read_bytes(results["report"]).decode()))
    for stage, refs in made.items():
        for name, ref in refs.items():
            typer.echo(f"{stage + '/' + name:32} {_short(store.path(ref))}")
    laid_out = (f"{name.capitalize()}: {folder / file}" for name, file in files.items() if name in results)
    typer.echo("   ".join(laid_out))
    now = store.run_stages(run)
    if moved := [stage for stage in made if stage not in now or now[stage].record.results != made[stage]]:
        typer.echo(f"another run moved {', '.join(f'{run}/{stage}' for stage in moved)} meanwhile", err=True)


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def main() -> None:
    """Entry point of the console script."""
    app()
