"""Runs a job in several ranks on this machine, through torch's elastic launcher.

A job is a folder: the caller lays down what it needs, the ranks (`riftco.training.rank_process`) leave there
what comes of it. Nothing is pickled. While they work:

    job.json            what to do; once it is gone, ranks end at once
    stop                appears when the ranks are to stop, as on SIGTERM

Ranks report in a folder that the job names, in the system's temporary one: the run's disk may be full.

    events.jsonl        what the leader reports (`riftco.training.rank_events`)
    failure-<rank>.json what ended a rank; if that disk is full too, its exit code says so
    metrics.jsonl, result.json   what came of it, beside the bundle in the job's folder

The agent that starts and watches the ranks runs in a thread of this process, so the caller's own thread hands
over metrics and sees signals as in a run of one process. Ranks end when this process does, however it does.
"""

import json
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from artifacts import (
    ArtifactError,
    BundleError,
    CheckpointError,
    DatasetError,
    StoreError,
    canonical_json,
    write_atomic,
)
from artifacts.disk_errors import FULL
from riftco.errors import (
    BackendUnavailableError,
    InputError,
    NonFiniteError,
    RankError,
    TokenizerError,
    TrainingStopped,
)
from riftco.log import LOGGER
from riftco.training.loop import MetricSink
from riftco.training.rank_events import EVENTS, Events
from riftco.training.stopping import StopRequest
from riftco.training.tracking import RunTracker

JOB, STOP = "job.json", "stop"
_POLITE = (-signal.SIGTERM, -signal.SIGINT)
_ARTIFACT_ERRORS = (BundleError, CheckpointError, DatasetError, StoreError)
_OUR_ERRORS = (BackendUnavailableError, InputError, NonFiniteError, TokenizerError, TrainingStopped)
_ERRORS: dict[str, type[Exception]] = {error.__name__: error for error in (*_ARTIFACT_ERRORS, *_OUR_ERRORS)}
"""Those meant for users."""
_POLL_SECONDS = 0.1


def launch(
    folder: Path,
    job: Mapping[str, Any],
    processes: int,
    *,
    metric_sink: MetricSink | None,
    stop: StopRequest,
) -> None:
    """Run the job in so many ranks, which report in the folder `job["reports"]`; returns when all are done.

    The sink gets the leader's metrics as they come, a `RunTracker` also what the leader measures; what it
    raises stops the ranks, and comes out when they have stopped. So does a request to stop, as
    TrainingStopped. An error that ends a rank ends them all: one that is meant for users comes
    out as it is, any other as RankError.
    """
    threads = max(1, torch.get_num_threads() // processes)
    facts = {"threads": threads, "launcher": os.getpid(), "tracked": isinstance(metric_sink, RunTracker)}
    write_atomic(folder / JOB, canonical_json({**job, **facts}))
    reports = Path(job["reports"])
    events = Events(reports / EVENTS, metric_sink)
    raised: BaseException | None = None
    with _ranks(folder, processes) as agent:
        while agent.is_alive():
            agent.join(_POLL_SECONDS)
            try:
                if raised is None:
                    events.pass_on()
            except Exception as error:
                raised = error
            if stop or raised is not None:
                (folder / STOP).touch()
        if raised is not None:
            raise raised
        events.pass_on()
        if agent.failures:
            raise what_ended(reports, agent.failures, processes, events.step, stopped=bool(stop))
        if agent.error is not None:
            raise agent.error


class _Agent(threading.Thread):
    """torch's agent: starts the ranks, and ends them all when one fails."""

    def __init__(self, folder: Path, processes: int) -> None:
        super().__init__(name="riftco ranks", daemon=True)
        self._folder, self._processes = folder, processes
        self.failures: dict[int, int] = {}
        """Exit codes by rank, of those that did not end well."""
        self.error: BaseException | None = None

    def run(self) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        )
        try:
            with _quiet("torch.distributed.elastic.multiprocessing.api"):
                elastic_launch(config, sys.executable)(
                    "-m", "riftco.training.rank_process", str(self._folder)
                )
        except ChildFailedError as error:
            self.failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except BaseException as error:
            self.error = error


@contextmanager
def _ranks(folder: Path, processes: int) -> Iterator[_Agent]:
    agent = _Agent(folder, processes)
    agent.start()
    try:
        yield agent
    finally:
        (folder / JOB).unlink()
        agent.join()


@dataclass(frozen=True, slots=True)
class Report:
    """How a rank says what ended it."""

    rank: int
    time_ns: int
    error: str
    message: str
    traceback: str
    facts: dict[str, Any] | None
    """Of a NonFiniteError, or the code of an ArtifactError."""


def what_ended(
    folder: Path, failures: Mapping[int, int], size: int, step: int, *, stopped: bool
) -> Exception:
    """What ended the run, from exit codes and what the ranks report.

    When one fails the others lose touch with it and fail as well, at times before it has reported: what is
    meant for users comes first.
    """
    for rank, code in sorted(failures.items()):
        if code < 0 and code not in _POLITE:
            name = signal.Signals(-code).name
            return RankError(
                f"rank {rank} of {size} was ended by {name}; run again to go on from what is kept"
            )
        if code in FULL:
            return RankError(
                f"rank {rank} of {size} ended, and {folder.parent} is too full for it to say why: "
                f"{FULL[code]} and run again to go on from what is kept"
            )
    reports = [Report(**json.loads(path.read_bytes())) for path in folder.glob("failure-*.json")]
    if stopped or not (reports or set(failures.values()) - set(_POLITE)):
        return TrainingStopped(f"stopped at step {step}; the same command goes on from there")
    if not reports:
        return RankError(f"ranks of {size} ended with exit codes {dict(failures)} and said nothing")
    first = min(reports, key=lambda report: (report.error not in _ERRORS, report.time_ns))
    report = min((r for r in reports if r.error == first.error), key=lambda report: report.rank)
    if kind := _ERRORS.get(report.error):
        return _as_raised(kind, report)
    LOGGER.error("rank %d of %d:\n%s", report.rank, size, report.traceback)
    return RankError(f"rank {report.rank} of {size}: {report.error}: {report.message}; the log says where")


def _as_raised(kind: type[Exception], report: Report) -> Exception:
    facts = report.facts or {}
    if issubclass(kind, NonFiniteError):
        return kind(report.message, facts)
    return kind(facts["code"], report.message) if issubclass(kind, ArtifactError) else kind(report.message)


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Without what torch would tell its own users: that it takes no signals in a thread, and exit codes."""
    log = logging.getLogger(logger)
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False
