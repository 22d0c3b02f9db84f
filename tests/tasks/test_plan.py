"""A plan says what would run and why, and changes nothing."""

from pathlib import Path
from typing import Any

import pytest

from artifacts import Ref, Store
from artifacts.lineage import ABSENT
from tasks.call import Results, Work
from tasks.plan import PlanRunner, StagePlan
from tasks.runner import PlainRunner
from tasks.step import main_result, step


@step(version=1)
def write_text(work: Work, options: dict[str, Any]) -> Results:
    return {"text": work.store.put_bytes("text", str(options).encode())}


@step(version=1)
def repeat_text(work: Work, text: Ref, times: int) -> Results:
    return {"text": work.store.put_bytes("text", work.store.read_bytes(text) * times)}


@step(version=1)
def join_texts(work: Work, texts: tuple[Ref, ...]) -> Results:
    return {"text": work.store.put_bytes("text", b"+".join(map(work.store.read_bytes, texts)))}


def dag(times: tuple[int, ...] = (2, 3), **options: Any) -> Results:
    written = write_text(options=options)
    repeated = repeat_text.map(text=written["text"], times=list(times))
    return join_texts(texts=tuple(main_result(results) for results in repeated))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.open(tmp_path / "store", durability="none")
    with PlainRunner(store, "demo"):
        dag(size=1, names=["a", "b"])
    return store


def plan(store: Store, run: str = "demo", **arguments: Any) -> dict[str, StagePlan]:
    with PlanRunner(store, run) as runner:
        dag(**arguments)
    return {stage.stage: stage for stage in runner.stages}


def statuses(stages: dict[str, StagePlan]) -> list[str]:
    return [stage.status for stage in stages.values()]


def files(store: Store) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}


@pytest.mark.parametrize("runner", [PlainRunner, PlanRunner])
def test_a_run_is_not_called_as_a_tag_that_would_hide_it(store: Store, runner: Any) -> None:
    tag = store.set_tag("best", store.resolve("demo/write-text"), None)
    refused = r"tag is called best.*another name.*store tag best --remove"
    with pytest.raises(ValueError, match=refused), runner(store, "best"):
        pass
    store.set_tag("best", None, tag)
    with runner(store, "best"):
        dag(size=1, names=["a", "b"])


def test_nothing_was_ever_made(tmp_path: Path) -> None:
    stages = plan(Store.open(tmp_path / "new"), size=1)
    assert list(stages) == ["write-text", "repeat-text-2", "repeat-text-3", "join-texts"]
    assert statuses(stages) == ["missing", "waiting", "waiting", "waiting"]
    assert stages["repeat-text-2"].reason == "for write-text"
    assert stages["join-texts"].reason == "for repeat-text-2, repeat-text-3"


def test_everything_is_there(store: Store) -> None:
    before = files(store)
    stages = plan(store, size=1, names=["a", "b"])
    assert statuses(stages) == ["cached"] * 4
    made = store.run_stages("demo")["join-texts"].record.results["text"]
    assert stages["join-texts"].reason == made.digest[:12]
    assert files(store) == before


def test_a_plan_agrees_with_another_run_of_the_same(store: Store) -> None:
    assert statuses(plan(store, "other", size=1, names=["a", "b"])) == ["cached"] * 4
    assert statuses(plan(store, "other", size=2, names=["a", "b"]))[0] == "missing"


def test_a_stale_stage_says_what_changed(store: Store) -> None:
    before = files(store)
    stages = plan(store, size=1.0, names=["a", "c", "d"], new={})
    assert statuses(stages) == ["stale", "waiting", "waiting", "waiting"]
    assert stages["write-text"].changes == [
        ("options.names.1", "b", "c"),
        ("options.names.2", ABSENT, "d"),
        ("options.size", 1, 1.0),
        ("options.new", ABSENT, {}),
    ]
    assert stages["write-text"].reason == (
        "options.names.1 b -> c, options.names.2 (absent) -> d, "
        "options.size 1 -> 1.0, options.new (absent) -> {}"
    )
    assert files(store) == before


def test_a_stage_without_a_past_is_missing_beside_cached_ones(store: Store) -> None:
    stages = plan(store, times=(3, 4), size=1, names=["a", "b"])
    assert statuses(stages) == ["cached", "cached", "missing", "waiting"]
    assert stages["join-texts"].reason == "for repeat-text-4"


def test_a_raised_version_makes_a_stage_stale(store: Store) -> None:
    newer = step(version=2)(write_text.body)
    with PlanRunner(store, "demo") as runner:
        newer(options={"size": 1, "names": ["a", "b"]})
    assert runner.stages[0].status == "stale"
    assert runner.stages[0].changes == [("version", 1, 2)]


def test_an_input_that_is_no_longer_given_is_one_change(store: Store) -> None:
    text = store.put_bytes("text", b"mine")
    with PlainRunner(store, "demo"):
        write_text(options={"source": text})
    with PlanRunner(store, "demo") as runner:
        write_text(options={"source": None})
    (change,) = runner.stages[0].changes
    assert change == ("options.source", {"kind": "text", "digest": text.digest}, None)
    assert runner.stages[0].reason.endswith("-> null")


def test_a_damaged_stage_is_told_and_what_follows_is_judged_as_if_it_came_out_the_same(store: Store) -> None:
    ref = store.run_stages("demo")["write-text"].record.results["text"]
    store.path(ref).unlink()
    stages = plan(store, size=1, names=["a", "b"])
    assert statuses(stages) == ["damaged", "cached", "cached", "cached"]
    assert stages["write-text"].reason == f"its text ({ref.digest[:12]}) is missing"


def test_a_run_does_what_the_plan_said(store: Store) -> None:
    arguments: dict[str, Any] = {"times": (3, 4), "size": 1, "names": ["a", "b"]}
    assert set(statuses(plan(store, **arguments))) != {"cached"}
    with PlainRunner(store, "demo"):
        dag(**arguments)
    assert set(statuses(plan(store, **arguments))) == {"cached"}
