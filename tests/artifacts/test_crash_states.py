"""Every disk that a power loss can leave: nothing torn, dangling, or acknowledged and lost."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from artifacts import StepRecord
from artifacts.garbage import collect
from artifacts.locking import StoreLock
from artifacts.object_folder import ObjectFolder
from artifacts.reference_folder import ReferenceFolder
from tests.artifacts.crash_model import FOLDER, Disk, Operation, replayed
from tests.artifacts.crash_stories import (
    OLD,
    STORIES,
    Acknowledge,
    Story,
    Survey,
    collect_garbage,
    history,
    killed_everywhere,
    learn_expected,
    noted,
    open_store,
    publish,
    survey,
)


@pytest.fixture(scope="module", autouse=True)
def _expected(tmp_path_factory) -> None:
    learn_expected(tmp_path_factory.mktemp("expected"))


@pytest.fixture
def base(tmp_path) -> Iterator[Path]:
    """A folder in memory where there is one: the model knows what is synced, the disk need not."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("limit", "stride"), [(10, 25), pytest.param(256, 4, marks=pytest.mark.soak)], ids=["quick", "full"]
)
def test_no_power_loss_tears_loses_or_strands_anything(base, limit, stride):
    found = survey(base, STORIES, limit=limit, stride=stride)
    assert found.faults == []
    assert found.count >= 10_000
    assert found.rerun >= 100
    print(f"{found.count} states, {found.different} different, {found.rerun} of them run again")


def test_without_hard_links_nothing_is_torn_lost_or_stranded_either(base, monkeypatch):
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    def rename_new(source: Path, target: Path) -> None:
        if target.exists():
            raise FileExistsError(target)
        os.rename(source, target)

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("artifacts.files.rename_new", rename_new)
    names = ("put", "put, then tag what is seen", "collect, then put what was garbage", "move a tag")
    found = survey(base, {name: STORIES[name] for name in names}, limit=24, stride=10)
    assert found.faults == []
    assert found.count >= 500


def without_syncs(
    operations: list[Operation], start: int, unsynced: Callable[[Disk, str], bool]
) -> list[Operation]:
    """The operations of a program that from `start` on does not sync the paths that `unsynced` chooses."""
    disk, kept = replayed(operations[:start]), operations[:start]
    for operation in operations[start:]:
        if operation.kind != "sync" or not unsynced(disk, operation.path):
            kept.append(operation)
        disk.apply(operation)
    return kept


def files_are_not_synced(disk: Disk, path: str) -> bool:
    return isinstance(disk.seen(path), bytes)


def folders_are_not_synced(disk: Disk, path: str) -> bool:
    return disk.seen(path) == FOLDER


def objects_are_not_synced(disk: Disk, path: str) -> bool:
    return "/objects/" in path and disk.seen(path) == FOLDER


@pytest.mark.parametrize(
    ("unsynced", "fault"),
    [
        (files_are_not_synced, "torn home/store/objects"),
        (folders_are_not_synced, "lost home/store/refs/runs/demo/train"),
        (objects_are_not_synced, "dangling home/store/refs/steps"),
    ],
)
def test_the_model_catches_a_publication_without_a_sync(base, unsynced, fault):
    past = [*noted(base / "past", [], [history]), Operation("settle", "")]
    operations = without_syncs(noted(base / "bad", past, [publish]), len(past), unsynced)
    found = Survey(base / "states", limit=64, stride=1_000_000)
    found.look(Story([publish], operations, len(past)))
    assert any(text.startswith(fault) for text in found.faults)


def name_other(base: Path, content: bytes) -> None:
    """Let a name mean an object that nothing else names."""
    store = open_store(base)
    record = StepRecord("train", 1, {}, {"log": store.put_bytes("metrics", content)}, 1.5)
    store.name_run("demo", "other", OLD, record)


def name_first(base: Path, _: Acknowledge) -> None:
    name_other(base, b"first")


def name_second(base: Path, _: Acknowledge) -> None:
    name_other(base, b"second")


def test_the_model_catches_a_collector_that_trusts_a_name_moved_by_a_killed_writer(base, monkeypatch):
    def dangling(place: Path) -> list[str]:
        found = Survey(place / "states", limit=64, stride=1_000_000)
        for story in killed_everywhere(place, [name_first, name_second, collect_garbage]):
            found.look(story)
        return [fault for fault in found.faults if fault.startswith("dangling home/store/refs/runs")]

    assert dangling(base / "good") == []
    monkeypatch.setattr(ReferenceFolder, "sync_all", lambda folder: None)
    assert dangling(base / "bad") != []


def test_the_model_catches_a_collector_that_counts_on_time_instead_of_a_lock(base, monkeypatch):
    """It comes after a writer has looked at an object and before the reference to it is there."""
    replace = ReferenceFolder.replace

    def late(folder: ReferenceFolder, name: str, data: bytes) -> None:
        collect(open_store(base / "bad"))
        replace(folder, name, data)

    def retire(folder: ObjectFolder, digest: str) -> None:
        folder.path(digest).unlink()

    monkeypatch.setattr(ReferenceFolder, "replace", late)
    monkeypatch.setattr(ObjectFolder, "retire", retire)
    monkeypatch.setattr(StoreLock, "exclusive", lambda lock: nullcontext())
    operations = noted(base / "bad", [Operation("settle", "")], [name_first])
    found = Survey(base / "states", limit=64, stride=1_000_000)
    found.look(Story([name_first], operations, 1))
    assert any(fault.startswith("dangling home/store/refs/runs") for fault in found.faults)
