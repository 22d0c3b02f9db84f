"""Ranks that a run launches by itself: what travels there and back, and every way in which they end."""

import errno
import io
import json
import logging
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from artifacts import ModelBundle, StoreError, Workspace
from riftco.data import PlainChatFormatter
from riftco.errors import BackendUnavailableError, InputError, NonFiniteError, RankError, TrainingStopped
from riftco.runtime import capture_bundle
from riftco.tokenizer import Tokenizer
from riftco.training import TrainingMetric, post_train, rank_process
from riftco.training.launch import JOB, Report, what_ended
from riftco.training.pretraining import Texts, pretrain_texts
from riftco.training.rank_events import EVENTS, Events, EventWriter
from riftco.training.rank_process import main
from riftco.training.tracking import RunTracker, open_tracking
from tests.artifacts.children import Child, Say
from tests.riftco.training.forked_ranks import (
    EXAMPLES,
    PRETRAINING,
    STEPS,
    TEXT,
    TUNING,
    in_ranks,
    one_thread,
    pretrained,
)
from tests.support import FIXTURES

LONG = TUNING.model_copy(update={"steps": 100_000, "checkpoint_steps": 5})
Sink = Callable[[TrainingMetric], None]


def tuned(workspace: Workspace | None = None, sink: Sink | None = None, **settings: Any) -> Any:
    base, config = ModelBundle.load(FIXTURES / "bpe.rift"), LONG.model_copy(update=settings)
    return post_train(base, EXAMPLES, config, workspace=workspace, metric_sink=sink)


def rank_ids() -> dict[int, int]:
    """Process ids by rank, of the ranks that this process has launched."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == os.getpid() and b"rank_process" in (folder / "cmdline").read_bytes():
                variables = (folder / "environ").read_bytes().split(b"\0")
                found[next(int(v[5:]) for v in variables if v.startswith(b"RANK="))] = int(folder.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def kept(workspace: Workspace) -> int:
    """The step of the newest checkpoint."""
    return next(workspace.points(lambda *_: None)).checkpoint.global_step


def test_launched_ranks_stop_on_a_signal_with_all_told_that_was_kept(tmp_path: Path) -> None:
    def stop(done: int, *_: Any) -> None:
        if done == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(TrainingStopped, match="the same command goes on from there"):
            tracked(tmp_path, stop, processes=2, steps=100_000)
    finally:
        signal.signal(signal.SIGTERM, before)
    rows = parquet.read_table(tmp_path / "metrics.parquet").to_pylist()
    trained = [row for row in rows if row["phase"] == "train"]
    assert [row["step"] for row in trained] == list(range(1, kept(Workspace(tmp_path / "work")) + 1))
    assert all(row["bits_per_byte"] and row["peak_memory_bytes"] for row in trained)
    assert not list((tmp_path / "work").glob("job-*"))


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks in /proc")
def test_a_run_killed_and_stopped_goes_on_and_ends_as_in_one_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "riftco")
    workspace = Workspace(tmp_path / "work", sync=False)
    settings: dict[str, Any] = {"processes": 2}

    def kill(metric: TrainingMetric) -> None:
        if metric.step == 12:
            os.kill(rank_ids()[1], signal.SIGKILL)

    with pytest.raises(RankError, match="rank 1 of 2 was ended by SIGKILL; run again"):
        tuned(workspace, kill, **settings)
    assert not rank_ids()
    first = kept(workspace)
    assert first >= 10

    seen: list[int] = []
    delivered: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: delivered.append(number))

    def stop(metric: TrainingMetric) -> None:
        seen.append(metric.step)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with pytest.raises(TrainingStopped, match="the same command goes on from there"):
            tuned(workspace, stop, **settings)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert delivered == [signal.SIGTERM]
    assert seen == list(range(first + 1, kept(workspace) + 1))
    assert f"going on from the checkpoint of step {first}" in caplog.text
    assert not list(workspace.folder.glob("job-*"))

    last = kept(workspace) + 3
    alone, result = tuned(steps=last), tuned(workspace, steps=last, **settings)
    assert [(m.phase, m.step) for m in result.metrics] == [(m.phase, m.step) for m in alone.metrics]
    losses = [[m.loss for m in run.metrics[:20]] for run in (result, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-5)
    assert result.bundle.metadata["training_config"]["processes"] == 2
    assert (result.example_count, result.objective) == (alone.example_count, alone.objective)
    assert not rank_ids()


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks in /proc")
def test_ranks_end_with_the_process_that_launched_them(tmp_path: Path) -> None:
    def job(say: Say) -> None:
        def sink(metric: TrainingMetric) -> None:
            say(rank_ids())
            (tmp_path / "said").touch()

        tuned(Workspace(tmp_path / "work", sync=False), sink, processes=2)

    child = Child(job)
    while not (tmp_path / "said").exists():
        time.sleep(0.1)
    child.kill()
    ids = child.wait()[0].values()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{number}").exists() for number in ids):
        assert time.monotonic() < deadline, "ranks outlive their launcher"
        time.sleep(0.1)


@pytest.mark.soak
def test_what_a_sink_raises_comes_out_once_the_state_is_kept(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work", sync=False)

    def refuse(metric: TrainingMetric) -> None:
        raise KeyError(metric.step)

    with pytest.raises(KeyError, match="1"):
        tuned(workspace, refuse, processes=2, checkpoint_steps=0)
    assert kept(workspace) >= 1


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Run the ranks of jobs as forked processes, which need not import everything again; their folders."""
    folders: list[Path] = []

    def launch(folder: Path, job: Any, processes: int, *, metric_sink: Any, stop: Any) -> None:
        folders.append(folder)
        assert Path(job["reports"]).parent == Path(tempfile.gettempdir())  # not on the run's disk
        facts = {"threads": 1, "launcher": os.getpid(), "tracked": isinstance(metric_sink, RunTracker)}
        (folder / JOB).write_text(json.dumps({**job, **facts}))
        codes = in_ranks(lambda say: say(main(folder)), processes)
        failures = {rank: code for rank, (code,) in enumerate(codes) if code}
        if failures:
            raise what_ended(Path(job["reports"]), failures, processes, 0, stopped=False)
        Events(Path(job["reports"]) / EVENTS, metric_sink).pass_on()

    monkeypatch.setattr("riftco.training.jobs.launch", launch)
    with one_thread():
        yield folders


@pytest.mark.usefixtures("forked")
def test_what_a_killed_launcher_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    workspace, foreign = Workspace(tmp_path / "work", sync=False), tmp_path / "riftco-ranks-foreign"
    foreign.mkdir()
    reports = Path(tempfile.mkdtemp(prefix="riftco-ranks-"))
    left = [workspace.folder / f"job-{number}" for number in range(3)]
    for folder, job in zip(left, ({"reports": str(reports)}, {"reports": str(foreign)}, {}), strict=True):
        folder.mkdir(parents=True)
        (folder / JOB).write_text(json.dumps(job))
    tuned(workspace, processes=2, steps=1)
    assert not reports.exists()
    assert foreign.exists()
    assert not any(folder.exists() for folder in left)


@pytest.mark.parametrize("fitted", [False, True], ids=["text alone", "with a tokenizer"])
def test_pretraining_in_ranks_gives_what_it_gives_here(forked: list[Path], fitted: bool) -> None:
    seen: list[TrainingMetric] = []
    if fitted:
        cut = len(TEXT) - 1
        texts = Texts(TEXT[:cut].replace("sun", "moon"), TEXT[cut:] + "\r\nthe \N{SNOWMAN}." * 4, "explicit")
        tokenizer = Tokenizer(TEXT + "\N{SNOWMAN}moon", method="bpe", vocabulary_size=272)
        config = PRETRAINING.model_copy(update={"sampling_strategy": "random_window"})
        alone = pretrain_texts(texts, config, metric_sink=None, workspace=None, tokenizer=tokenizer)
        result = pretrain_texts(
            texts,
            config.model_copy(update={"processes": 2}),
            metric_sink=seen.append,
            workspace=None,
            tokenizer=tokenizer,
        )
    else:
        alone = pretrained()
        result = pretrained(sink=seen.append, processes=2)
    assert seen == list(result.metrics)
    assert [m.loss for m in seen] == pytest.approx([m.loss for m in alone.metrics], abs=1e-6)
    assert result.bundle.tokenizer == alone.bundle.tokenizer
    metadata = dict(result.bundle.metadata)
    metadata["training_config"] = {k: v for k, v in metadata["training_config"].items() if k != "processes"}
    assert metadata == alone.bundle.metadata
    counts = (result.training_token_count, result.validation_token_count)
    assert counts == (alone.training_token_count, alone.validation_token_count)
    assert not forked[0].exists()


def tracked(folder: Path, report: Any = lambda *_: None, **settings: Any) -> list[dict[str, Any]]:
    """The table of a pretraining."""
    config = PRETRAINING.model_copy(update=settings)
    with open_tracking(config, run="book", folder=folder, report=report) as tracking:
        pretrained(Workspace(folder / "work", sync=False), tracking, **settings)
    return parquet.read_table(folder / "metrics.parquet").to_pylist()


def test_the_tracker_of_ranks_tells_what_that_of_one_process_does(
    forked: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"sample_steps": 2, "sample_prompt": "the", "evaluation_interval": 2}
    alone = tracked(tmp_path / "alone", **settings)
    caplog.clear()
    caplog.set_level(logging.INFO, "riftco")
    shown: list[int] = []
    ranks = tracked(tmp_path / "ranks", lambda done, *_: shown.append(done), processes=2, **settings)
    assert shown == [1, 2, 3, 4, 5, 6]
    for mine, expected in zip(ranks, alone, strict=True):
        assert {name for name in mine if mine[name] is None} == {n for n in expected if expected[n] is None}
        assert mine["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], abs=1e-5)
    seconds = [row["elapsed_seconds"] for row in ranks]
    assert seconds == sorted(set(seconds))
    samples = (tmp_path / "ranks" / "samples.jsonl").read_text()
    assert samples == (tmp_path / "alone" / "samples.jsonl").read_text()
    assert len(samples.splitlines()) == 3
    assert "step 4 writes 'the" in caplog.text
    assert caplog.text.count("GFLOP/s here") == 1


def test_the_table_of_ranks_that_go_on_has_the_whole_run(forked: list[Path], tmp_path: Path) -> None:
    half = {"steps": STEPS // 2, "checkpoint_steps": STEPS // 2, "sample_steps": 1}
    pretrained(Workspace(tmp_path / "work", sync=False), **half)
    rows = [row for row in tracked(tmp_path, sample_steps=1, processes=2) if row["phase"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["peak_memory_bytes"] is None for row in rows] == [True] * 3 + [False] * 3
    samples = [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert samples == [4, 5, 6]


def test_a_rank_whose_launcher_is_gone_before_it_reads_its_job_ends_at_once(tmp_path: Path) -> None:
    gone = Child(lambda say: None)
    gone.wait()
    job = {"launcher": gone.id, "threads": 1, "tracked": False, "config": {"sample_steps": 0}}
    (tmp_path / JOB).write_text(json.dumps({**job, "reports": str(tmp_path)}))

    def orphan(say: Say) -> None:
        rank_process.run_job = lambda *_: time.sleep(5)  # type: ignore[assignment]
        main(tmp_path)
        say("worked for nobody")

    assert Child(orphan).wait() == []
    assert main(tmp_path / "no such job") == 1


def test_fine_tuning_in_ranks_hands_over_every_field_of_its_result(forked: list[Path]) -> None:
    settings: dict[str, Any] = {"steps": 2, "fine_tuning_method": "lora", "held_out": 3}
    alone, result = tuned(**settings), tuned(**settings, processes=2)
    names = ("example_count", "objective", "fine_tuning_method")
    assert [getattr(result, name) for name in names] == [getattr(alone, name) for name in names]
    assert [(m.phase, m.step) for m in result.metrics] == [(m.phase, m.step) for m in alone.metrics]
    assert result.merge_difference == pytest.approx(alone.merge_difference, abs=1e-6)
    assert result.bundle.parent_artifact_id == alone.bundle.parent_artifact_id


def test_an_error_for_users_comes_out_as_it_is(forked: list[Path]) -> None:
    with pytest.raises(InputError, match="needs 10001"):
        pretrained(sampling_strategy="random_window", context_size=10_000, processes=2)


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_under_the_run_is_told_as_in_one_process(
    forked: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("artifacts.workspace.write_atomic", full)
    settings = {"steps": 2, "checkpoint_steps": 1}
    said = []
    for processes in (1, 2):
        with pytest.raises(StoreError, match="is full: free some space") as caught:
            tuned(Workspace(tmp_path), **settings, processes=processes)
        said.append((caught.value.code, str(caught.value)))
    assert said == [("disk-full", f"the folder {tmp_path} is full: free some space and run again")] * 2


def test_a_result_that_finds_no_room_is_told_with_the_remedy(
    forked: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelBundle, "save", full)
    with pytest.raises(StoreError, match=r"^the folder .* is full: free some space and run again$"):
        tuned(processes=2, steps=1)


def test_a_rank_that_cannot_even_report_says_by_its_exit_code_that_the_disk_is_full(
    forked: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelBundle, "save", full)
    monkeypatch.setattr(rank_process, "write_atomic", full)
    with pytest.raises(
        RankError, match=r"^rank 0 of 2 ended, and .* is too full for it to say why: free some"
    ):
        tuned(processes=2, steps=1)


def test_metrics_that_find_no_room_end_no_run_and_come_once_there_is(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Disk(io.BytesIO):
        name, room = EVENTS, 100

        def write(self, data: Any) -> int:
            if self.room <= 0:
                full()
            written = super().write(data[: self.room])
            self.room -= written
            return written

    disk, metrics = Disk(), [TrainingMetric("train", step, 1.0, math.e) for step in (1, 2, 3)]
    writer = EventWriter(disk)
    for metric in metrics[:2]:
        writer.metric(metric, {}, 1.0)
    assert len(disk.getvalue()) == 100
    disk.room = 10_000
    writer.metric(metrics[2], {}, 1.0)
    assert disk.getvalue() == b"".join(map(encoded, metrics))
    said = capfd.readouterr().err
    assert said == f"{EVENTS}: No space left on device; the run goes on, what it tells comes later\n"


def test_what_still_waits_for_room_at_the_end_is_told_then(
    forked: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(writer: EventWriter, **event: Any) -> None:
        writer._waiting += json.dumps(event).encode() + b"\n"

    monkeypatch.setattr(EventWriter, "write", wait)
    seen: list[TrainingMetric] = []
    assert list(pretrained(sink=seen.append, processes=2).metrics) == seen


def test_an_error_of_ours_comes_out_in_one_line_with_its_traceback_in_the_log(
    forked: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any, **options: Any) -> ModelBundle:
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("planted")
        return capture_bundle(*arguments, **options)

    monkeypatch.setattr("riftco.training.post_training.capture_bundle", broken)
    with pytest.raises(RankError, match=r"^rank 1 of 2: ZeroDivisionError: planted; the log says where$"):
        tuned(processes=2, steps=1)
    assert "in broken" in caplog.text


def test_a_formatter_of_your_own_is_refused() -> None:
    class Shouting(PlainChatFormatter):
        pass

    with pytest.raises(InputError, match="Shouting cannot be handed to other processes"):
        post_train(
            ModelBundle.load(FIXTURES / "bpe.rift"),
            EXAMPLES,
            TUNING.model_copy(update={"processes": 2}),
            formatter=Shouting(),
        )


def reported(folder: Path, *reports: tuple[int, int, str]) -> Path:
    """A folder with the reports (rank, time, kind of error)."""
    for rank, time_ns, error in reports:
        facts = {"NonFiniteError": {"step": 3}, "StoreError": {"code": "disk-full"}}.get(error)
        report = Report(rank, time_ns, error, f"said by {rank}", "Traceback", facts)
        (folder / f"failure-{rank}.json").write_text(json.dumps(asdict(report)))
    return folder


@pytest.mark.parametrize(
    ("failures", "reports", "stopped", "kind", "says"),
    [
        ({0: 1, 1: -9}, [(0, 5, "RuntimeError")], False, RankError, "rank 1 of 2 was ended by SIGKILL"),
        ({0: -15, 1: -11}, [], True, RankError, "rank 1 of 2 was ended by SIGSEGV"),
        ({0: 1, 1: 1}, [(0, 9, "RuntimeError"), (1, 5, "InputError")], False, InputError, "said by 1"),
        ({0: 1, 1: 1}, [(0, 9, "InputError"), (1, 5, "InputError")], False, InputError, "said by 0"),
        ({0: 1}, [(0, 5, "NonFiniteError")], False, NonFiniteError, "said by 0"),
        ({0: 1}, [(0, 5, "BackendUnavailableError")], False, BackendUnavailableError, "said by 0"),
        ({1: 1, 0: -15}, [(1, 5, "TrainingStopped")], False, TrainingStopped, "said by 1"),
        ({0: -15, 1: -15}, [], False, TrainingStopped, "stopped at step 7"),
        ({0: 1, 1: -15}, [(0, 5, "RuntimeError")], True, TrainingStopped, "stopped at step 7"),
        ({0: 1, 1: 1}, [(1, 5, "RuntimeError")], False, RankError, "rank 1 of 2: RuntimeError: said by 1"),
        ({0: 1, 1: 1}, [(0, 9, "StoreError"), (1, 5, "RuntimeError")], False, StoreError, "said by 0"),
        (
            {0: 28, 1: 1},
            [(1, 5, "RuntimeError")],
            True,
            RankError,
            "too full for it to say why: free some sp",
        ),
        ({0: 3}, [], False, RankError, "exit codes {0: 3} and said nothing"),
    ],
)
def test_what_ended_a_run_is_told_from_exit_codes_and_reports(
    tmp_path: Path,
    failures: dict[int, int],
    reports: list[tuple[int, int, str]],
    stopped: bool,
    kind: type[Exception],
    says: str,
) -> None:
    error = what_ended(reported(tmp_path, *reports), failures, 2, 7, stopped=stopped)
    assert type(error) is kind
    assert says in str(error)
    if isinstance(error, NonFiniteError):
        assert error.facts == {"step": 3}
    if isinstance(error, StoreError):
        assert error.code == "disk-full"


def encoded(metric: TrainingMetric) -> bytes:
    stream = io.BytesIO()
    EventWriter(stream).metric(metric, {}, 1.0)
    return stream.getvalue()


def test_events_are_passed_on_once_each_and_only_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "riftco")
    path = tmp_path / EVENTS
    seen: list[TrainingMetric] = []
    events = Events(path, seen.append)
    events.pass_on()
    metrics = [TrainingMetric("train", step, 1e3, float("inf")) for step in (1, 2)]
    first, second = (encoded(metric) for metric in metrics)
    path.write_bytes(first + b'{"level":30,"log":"100 % done"}\n' + second[:9])
    events.pass_on()
    assert (seen, events.step) == ([metrics[0]], 1)
    assert caplog.records[-1].getMessage() == "100 % done"
    with path.open("ab") as stream:
        stream.write(second[9:])
    events.pass_on()
    events.pass_on()
    assert (seen, events.step) == (metrics, 2)
    assert len(caplog.records) == 1
