"""The `riftco` command: the model commands of `riftco.cli`, and those that run or plan a flow.

Prefect and torch are imported inside the commands, so that `--help` and `plan` are quick.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from artifacts import Ref, Store, write_atomic
from riftco.cli import Assignments, ConfigFile, app
from riftco.commands import user_errors
from riftco.config import PipelineConfig
from riftco.errors import InputError
from riftco.settings import load_config

if TYPE_CHECKING:
    from tasks.plan import PlanRunner

run_app = typer.Typer(no_args_is_help=True, help="Run a flow; a local Prefect server comes and goes with it.")
app.add_typer(run_app, name="run")
Stage = Annotated[list[str] | None, typer.Option("--force", help="Run this stage again; may be repeated.")]
FromStage = Annotated[str | None, typer.Option("--from-stage", help="Run this stage and all after it again.")]
RUNS = Path("runs")


@run_app.command("pipeline")
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
    from flows.local_server import local_prefect

    with user_errors():
        settings = load_config(PipelineConfig(), config, assignments or ())
        store = Store.open()
        planned = _plan(store, settings)  # what is wrong is told before a server is started
        for stage in [*(force or ()), *([from_stage] if from_stage else [])]:
            if stage not in planned.names:
                stages = ", ".join(stage.stage for stage in planned.stages)
                raise InputError(f"no stage is called {stage}; the stages are {stages}")
        with local_prefect():
            from flows.pipeline import pipeline

            results = pipeline(settings, tuple(force or ()), from_stage)
        _lay_out(store, settings.name, results, [stage.stage for stage in planned.stages])


@app.command()
def plan(config: ConfigFile = None, assignments: Assignments = None) -> None:
    """Say what `run pipeline` would do with the same settings, and why, without doing it."""
    with user_errors():
        settings = load_config(PipelineConfig(), config, assignments or ())
        runner = _plan(Store.preview(), settings)
        table = Table("stage", "status", "why", box=None)
        for stage in runner.stages:
            table.add_row(stage.stage, stage.status, stage.reason)
        console = Console()
        console.print(table)
        waiting = sum(stage.status != "cached" for stage in runner.stages)
        console.print(f"{len(runner.stages) - waiting} of {len(runner.stages)} stages are up to date")


def _plan(store: Store, settings: PipelineConfig) -> "PlanRunner":
    """The plan of a run; bad input is an InputError."""
    from flows.dag import Sources, pipeline_dag
    from tasks.plan import PlanRunner

    sources = Sources.read(settings, store=None)
    with PlanRunner(store, settings.name) as runner:
        pipeline_dag(settings, sources)
    return runner


def _lay_out(store: Store, run: str, results: dict[str, Ref], stages: list[str]) -> None:
    """Put the report under `runs/<run>`, print it, and list every result with its id and path."""
    folder = RUNS / run
    for name, ref in (("report.md", results["report"]), ("loss.png", results["plot"])):
        write_atomic(folder / name, store.read_bytes(ref), mode=0o644)
    console = Console()
    console.print(Markdown(store.read_bytes(results["report"]).decode()))
    made = store.run_stages(run)
    for stage in stages:
        for name, ref in made[stage].record.results.items():
            typer.echo(f"{stage + '/' + name:32} {_short(store.path(ref))}")
    typer.echo(f"Report: {folder / 'report.md'}   Loss: {folder / 'loss.png'}")


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def main() -> None:
    """Entry point of the console script."""
    app()
