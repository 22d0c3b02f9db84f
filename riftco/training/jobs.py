"""The two stages as jobs of several ranks: what goes into a job's folder, what is done, what comes out.

Everything travels in the project's own formats: texts, JSON, bundles, lines of metrics.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from artifacts import ModelBundle, TokenizerSpec, Workspace, canonical_json, write_atomic
from artifacts.disk_errors import writing
from riftco.config import PostTrainingConfig, PretrainingConfig
from riftco.data import InstructionExample, InstructionFormatter, PlainChatFormatter, load_instructions
from riftco.errors import InputError
from riftco.tokenizer import Tokenizer
from riftco.training.launch import JOB, launch
from riftco.training.loop import MetricSink
from riftco.training.metrics import decode_metrics, encode_metrics
from riftco.training.post_training import PostTrainingResult, post_train
from riftco.training.pretraining import PretrainingResult, Texts, pretrain_texts
from riftco.training.ranks import is_leader
from riftco.training.stopping import StopRequest, deferred_signals

_TRAINING, _VALIDATION, _BASE = "training.txt", "validation.txt", "base.rift"
_EXAMPLES, _HELD_OUT = "examples.jsonl", "held-out.jsonl"
_BUNDLE, _METRICS, _RESULT = "bundle.rift", "metrics.jsonl", "result.json"
_PREFIX, _REPORTS = "job-", "riftco-ranks-"


def pretrain_in_ranks(
    texts: Texts,
    config: PretrainingConfig,
    tokenizer: Tokenizer | None,
    *,
    metric_sink: MetricSink | None,
    workspace: Workspace | None,
) -> PretrainingResult:
    """`pretrain_texts` in `config.processes` ranks on this machine."""
    spec = None if tokenizer is None else tokenizer.spec.to_json()
    files = {_TRAINING: texts.training.encode(), _VALIDATION: texts.validation.encode()}
    facts = {"stage": "pretraining", "source": texts.source, "tokenizer": spec}
    return PretrainingResult(**_ran(files, facts, config, metric_sink, workspace))


def post_train_in_ranks(
    base_bundle: ModelBundle,
    examples: Sequence[InstructionExample],
    config: PostTrainingConfig,
    *,
    validation: Sequence[InstructionExample],
    formatter: InstructionFormatter,
    metric_sink: MetricSink | None,
    workspace: Workspace | None,
) -> PostTrainingResult:
    """`post_train` in `config.processes` ranks on this machine; InputError for a formatter of your own."""
    if type(formatter) is not PlainChatFormatter:
        raise InputError(
            f"the formatter {type(formatter).__name__} cannot be handed to other processes; "
            "start the ranks with torchrun, or use processes 1"
        )
    files = {
        _BASE: base_bundle.to_bytes(),
        _EXAMPLES: _jsonl(examples),
        **({_HELD_OUT: _jsonl(validation)} if validation else {}),
    }
    facts = {"stage": "post_training"}
    return PostTrainingResult(**_ran(files, facts, config, metric_sink, workspace))


def _jsonl(examples: Sequence[InstructionExample]) -> bytes:
    return b"".join(canonical_json(example.identity) + b"\n" for example in examples)


def run_job(folder: Path, job: Mapping[str, Any], metric_sink: MetricSink) -> None:
    """What each rank does: the stage that the job names. The leader leaves the bundle in the folder, and
    the other results where it reports.
    """
    workspace = None if job["workspace"] is None else Workspace(Path(job["workspace"]))
    settings = json.dumps(job["config"])
    result: PretrainingResult | PostTrainingResult
    names: tuple[str, ...]
    if job["stage"] == "pretraining":
        training, validation = ((folder / name).read_bytes().decode() for name in (_TRAINING, _VALIDATION))
        spec = job["tokenizer"]
        result = pretrain_texts(
            Texts(training, validation, job["source"]),
            PretrainingConfig.model_validate_json(settings),
            metric_sink=metric_sink,
            workspace=workspace,
            tokenizer=None if spec is None else Tokenizer.from_spec(TokenizerSpec.from_json(spec)),
        )
        names = ("training_token_count", "validation_token_count")
    else:
        result = post_train(
            ModelBundle.load(folder / _BASE),
            load_instructions(folder / _EXAMPLES),
            PostTrainingConfig.model_validate_json(settings),
            validation=load_instructions(folder / _HELD_OUT) if (folder / _HELD_OUT).exists() else (),
            metric_sink=metric_sink,
            workspace=workspace,
        )
        names = ("example_count", "objective", "fine_tuning_method", "merge_difference")
    if is_leader():
        facts = {name: getattr(result, name) for name in names}
        reports = Path(job["reports"])
        with writing(folder.parent, "folder"):
            result.bundle.save(folder / _BUNDLE)
        with writing(reports.parent, "folder"):
            write_atomic(reports / _METRICS, encode_metrics(result.metrics))
            write_atomic(reports / _RESULT, canonical_json(facts))


def _ran(
    files: Mapping[str, bytes],
    facts: Mapping[str, Any],
    config: PretrainingConfig | PostTrainingConfig,
    metric_sink: MetricSink | None,
    workspace: Workspace | None,
) -> dict[str, Any]:
    """The fields of a job's result, once all ranks have done it; nothing is left on the disk."""
    parent = None if workspace is None else workspace.folder
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
        for left_by_a_killed_process in parent.glob(f"{_PREFIX}*"):
            _remove(left_by_a_killed_process)
    signals = nullcontext(StopRequest()) if workspace is None else deferred_signals()
    with (
        signals as stop,
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent) as name,
        tempfile.TemporaryDirectory(prefix=_REPORTS) as reports,
    ):
        folder = Path(name)
        with writing(folder.parent, "folder"):
            for file, content in files.items():
                write_atomic(folder / file, content)
        place = None if parent is None else str(parent.absolute())
        job = {**facts, "config": config.model_dump(mode="json"), "workspace": place, "reports": reports}
        launch(folder, job, config.processes, metric_sink=metric_sink, stop=stop)
        return _results(folder, Path(reports))


def _remove(folder: Path) -> None:
    """A job's folder, and the one that its ranks reported in."""
    with suppress(OSError, ValueError):
        reports = Path(json.loads((folder / JOB).read_bytes()).get("reports", ""))
        if reports.parent == Path(tempfile.gettempdir()) and reports.name.startswith(_REPORTS):
            shutil.rmtree(reports, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _results(folder: Path, reports: Path) -> dict[str, Any]:
    bundle = ModelBundle.from_bytes((folder / _BUNDLE).read_bytes())
    metrics = tuple(decode_metrics((reports / _METRICS).read_bytes()))
    return {"bundle": bundle, "metrics": metrics, **json.loads((reports / _RESULT).read_bytes())}
