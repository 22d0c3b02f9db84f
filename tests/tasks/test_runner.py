"""Running steps: made once, found again, made again after damage, and never by two at a time."""

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from artifacts import Ref, Store, step_key
from artifacts.fsck import check_store
from riftco.exclusive import exclusive
from tasks.call import Results, Work
from tasks.runner import Interrupted, PlainRunner, readable
from tasks.step import main_result, step

ran: list[str] = []


@step(version=1)
def write_text(work: Work, text: str) -> Results:
    """A text and its length."""
    ran.append(f"write {text}")
    return {
        "text": work.store.put_bytes("text", text.encode()),
        "length": work.store.put_bytes("length", str(len(text)).encode()),
    }


@step(version=1)
def repeat_text(work: Work, text: Ref, times: int) -> Results:
    ran.append(f"repeat {times}")
    return {"text": work.store.put_bytes("text", work.store.read_bytes(text) * times)}


@step(version=1)
def join_texts(work: Work, texts: tuple[Ref, ...]) -> Results:
    ran.append("join")
    return {"text": work.store.put_bytes("text", b"+".join(map(work.store.read_bytes, texts)))}


def dag(text: str = "ab") -> Results:
    written = write_text(text=text)
    repeated = repeat_text.map(text=written["text"], times=[2, 3])
    return join_texts(texts=tuple(main_result(results) for results in repeated))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    ran.clear()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", durability="none")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="riftco")
    return caplog


def run(store: Store, name: str = "demo", **options: Any) -> Results:
    with PlainRunner(store, name, **options):
        return dag()


def damage(store: Store, ref: Ref) -> None:
    path = store.path(ref)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_the_dag_runs_and_names_its_results(store: Store) -> None:
    results = run(store)
    assert store.read_bytes(results["text"]) == b"abab+ababab"
    assert ran == ["write ab", "repeat 2", "repeat 3", "join"]
    stages = store.run_stages("demo")
    assert sorted(stages) == ["join-texts", "repeat-text-2", "repeat-text-3", "write-text"]
    assert stages["join-texts"].record.results == results
    assert store.resolve("demo/write-text/length").kind == "length"


def test_the_record_tells_how_the_results_were_made(store: Store) -> None:
    with PlainRunner(store, "demo"):
        results = write_text(text="ab")
    made = store.run_stages("demo")["write-text"]
    key, record = made.key, made.record
    assert store.recall(key) == record
    assert (record.step, record.version, record.recipe) == ("write-text", 1, {"text": "ab"})
    assert record.results == results
    assert 0 <= record.seconds < 10


@step(version=1)
def leave_table(work: Work) -> Results:
    work.folder.mkdir(parents=True)
    (work.folder / "table").write_text(work.store.root.name)
    return {"text": work.store.put_bytes("text", b"x")}


def test_stores_side_by_side_have_folders_of_their_own_for_what_people_look_at(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with PlainRunner(Store.open(tmp_path / name, durability="none"), "demo"):
            leave_table()
    tables = [tmp_path / "tracking" / name / "demo" / "leave-table" / "table" for name in ("one", "two")]
    assert [table.read_text() for table in tables] == ["one", "two"]


def test_a_second_run_runs_nothing_and_says_so(store: Store, lines: pytest.LogCaptureFixture) -> None:
    results = run(store)
    ran.clear()
    lines.clear()
    assert run(store) == results
    assert ran == []
    digest = results["text"].digest[:12]
    assert len(lines.messages) == 4
    assert lines.messages[-1] == f"join-texts: up to date ({digest})"


def test_a_first_run_says_how_long_each_step_took(store: Store, lines: pytest.LogCaptureFixture) -> None:
    digest = run(store)["text"].digest[:12]
    assert len(lines.messages) == 4
    assert lines.messages[-1] == f"join-texts: done in 0.0 s -> {digest}"


def test_another_run_of_the_same_names_what_is_there(store: Store) -> None:
    run(store, "first")
    ran.clear()
    run(store, "second")
    assert ran == []
    assert store.run_stages("second") == store.run_stages("first")


def test_a_change_runs_what_depends_on_it(store: Store) -> None:
    run(store)
    ran.clear()
    with PlainRunner(store, "demo"):
        text = write_text(text="ab")["text"]
        repeat_text.map(text=text, times=[3, 4])
    assert ran == ["repeat 4"]


@pytest.mark.parametrize(
    "harm", [damage, lambda store, ref: store.path(ref).unlink()], ids=["damaged", "missing"]
)
@pytest.mark.parametrize("name", ["text", "length"])
def test_a_step_with_a_result_that_is_not_intact_runs_again(
    store: Store, lines: pytest.LogCaptureFixture, harm: Any, name: str
) -> None:
    results = run(store)
    ref = store.run_stages("demo")["write-text"].record.results[name]
    harm(store, ref)
    assert any(
        ref.digest in problem.where + problem.message for problem in check_store(store, full=True).problems
    )
    ran.clear()
    lines.clear()
    assert run(store) == results
    assert ran == ["write ab"]
    assert check_store(store, full=True).problems == []
    assert lines.messages[0].startswith(f"write-text: its {name} ({ref.digest[:12]}) is ")
    assert "running it again" in lines.messages[0]


def test_an_unreadable_memo_means_the_step_runs_again(store: Store) -> None:
    results = run(store)
    key = store.run_stages("demo")["join-texts"].key
    (memo,) = store.root.rglob(f"refs/steps/{key}")
    memo.chmod(0o644)
    memo.write_bytes(b"{")
    ran.clear()
    assert run(store) == results
    assert ran == ["join"]
    assert store.recall(key) is not None


def test_a_failing_step_leaves_no_memo_and_no_lock(store: Store) -> None:
    @step(version=1)
    def fail(work: Work) -> Results:
        raise OSError("disk on fire")

    for _ in range(2):
        with pytest.raises(OSError, match="disk on fire"), PlainRunner(store, "demo"):
            fail()
    assert store.run_stages("demo") == {}
    assert list((store.root / "locks").iterdir()) == []


@pytest.mark.parametrize("returned", [None, {}, {"text": "not a reference"}])
def test_a_step_must_return_references(store: Store, returned: Any) -> None:
    @step(version=1)
    def wrong(work: Work) -> Results:
        return returned

    with pytest.raises(TypeError, match="wrong must return references"), PlainRunner(store, "demo"):
        wrong()


def test_forced_stages_run_and_only_those(store: Store) -> None:
    run(store)
    ran.clear()
    run(store, force=["repeat-text-3", "join-texts"])
    assert ran == ["repeat 3", "join"]


def test_a_forced_step_is_forced_for_every_element(store: Store) -> None:
    run(store)
    ran.clear()
    run(store, force={"repeat-text"})
    assert ran == ["repeat 2", "repeat 3"]


def test_from_a_stage_on_everything_runs(store: Store) -> None:
    run(store)
    ran.clear()
    run(store, from_stage="repeat-text-3")
    assert ran == ["repeat 3", "join"]


@pytest.mark.parametrize("options", [{"force": ["jion"]}, {"from_stage": "jion"}])
def test_a_misspelt_stage_is_told_with_the_stages_there_are(store: Store, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"'jion'.*write-text.*join-texts"):
        run(store, **options)


def test_forcing_a_step_that_gives_something_else_keeps_the_intact_results(
    store: Store, lines: pytest.LogCaptureFixture
) -> None:
    @step(version=1)
    def unsteady(work: Work) -> Results:
        ran.append("unsteady")
        return {"text": work.store.put_bytes("text", f"run {len(ran)}".encode())}

    with PlainRunner(store, "demo"):
        first = unsteady()
    with PlainRunner(store, "demo", force=["unsteady"]):
        assert unsteady() == first
    assert len(ran) == 2
    assert "differs" in lines.messages[-1]


def test_two_different_calls_of_one_name_are_refused(store: Store) -> None:
    with PlainRunner(store, "demo"):
        write_text(text="a")
        with pytest.raises(ValueError, match=r"'write-text'.*named"):
            write_text(text="b")
        write_text.named("write-b")(text="b")
        write_text(text="a")
    assert sorted(store.run_stages("demo")) == ["write-b", "write-text"]


def test_progress_reaches_the_reporter(store: Store) -> None:
    @step(version=1)
    def slow(work: Work, size: int) -> Results:
        for done in range(1, 3):
            work.progress(done, 2, loss=1 / done)
        return {"text": work.store.put_bytes("text", b"x")}

    seen: list[Any] = []
    with PlainRunner(store, "demo", report=lambda *report: seen.append(report)):
        slow.map(size=[4])
    assert seen == [("slow 4", 1, 2, {"loss": 1.0}), ("slow 4", 2, 2, {"loss": 0.5})]


def test_a_stopped_runner_interrupts_a_body_at_its_next_progress(store: Store) -> None:
    runner = PlainRunner(store, "demo")

    @step(version=1)
    def endless(work: Work) -> Results:
        runner._stopping.set()
        for done in range(10_000):
            work.progress(done, 10_000)
        raise AssertionError("never stopped")

    with pytest.raises(Interrupted, match="endless was stopped at 0 of 10000"), runner:
        endless()
    assert store.run_stages("demo") == {}


def test_a_stopped_runner_waits_for_nobody(store: Store) -> None:
    @step(version=1)
    def held(work: Work) -> Results:
        raise AssertionError("ran beside the holder")

    runner = PlainRunner(store, "demo")
    runner._stopping.set()
    lock = store.root / "locks" / f"{step_key('held', 1, {})}.lock"
    with exclusive(lock, lambda: None), runner, pytest.raises(Interrupted, match="held was stopped while"):
        held()


def test_a_runner_of_another_thread_waits_and_then_finds_the_results(
    store: Store, lines: pytest.LogCaptureFixture
) -> None:
    started, may_end = threading.Event(), threading.Event()

    @step(version=1)
    def gated(work: Work) -> Results:
        ran.append("gated")
        started.set()
        assert may_end.wait(10)
        return {"text": work.store.put_bytes("text", b"x")}

    def one(name: str) -> None:
        with PlainRunner(store, name):
            gated()

    threads = [threading.Thread(target=one, args=(name,)) for name in ("first", "second")]
    threads[0].start()
    assert started.wait(10)
    threads[1].start()
    deadline = time.monotonic() + 10
    while "gated: another process is making it; waiting" not in lines.messages:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert ran == ["gated"]
    assert store.run_stages("first") == store.run_stages("second")


RACE = """
import sys, time
from artifacts import Store
from tasks.call import Results, Work
from tasks.runner import PlainRunner
from tasks.step import step
@step(version=1)
def make(work: Work) -> Results:
    print("made", flush=True)
    time.sleep(0.3)
    return {"text": work.store.put_bytes("text", b"x")}
store = Store.open(sys.argv[1])
with PlainRunner(store, "demo"):
    make()
"""


def test_only_one_of_two_processes_makes_the_results(store: Store) -> None:
    command = [sys.executable, "-c", RACE, str(store.root)]
    root = Path(__file__).parents[2]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) for _ in range(2)]
    outputs = [racer.communicate(timeout=60)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert b"".join(outputs) == b"made\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (61.4, "61 s"), (3599.6, "3600 s")]
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert readable(seconds) == text
