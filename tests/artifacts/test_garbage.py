"""Garbage collection: what no reference reaches goes, everything else stays, and late-comers lose nothing."""

import hashlib
import os
import shutil
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from artifacts import Ref, StepRecord, Store, StoreError, step_key
from artifacts.fsck import check_store
from artifacts.garbage import collect
from tests.artifacts.bundles import small_bundle


@pytest.fixture
def store(tmp_path) -> Store:
    return Store.open(tmp_path / "store", durability="none")


def made(store: Store, step: str, data: bytes, *inputs: Ref) -> tuple[str, StepRecord]:
    """A remembered step that read the inputs and made one object."""
    recipe = {f"input-{i}": {"kind": ref.kind, "digest": ref.digest} for i, ref in enumerate(inputs)}
    record = StepRecord(step, 1, recipe, {"text": store.put_bytes("text", data)}, 1.0)
    key = step_key(step, 1, recipe)
    return key, store.remember(key, record)


def age(store: Store) -> None:
    """Let all references be two days old, so that none is too young to be forgotten."""
    for name in store.reference_names():
        os.utime(store.root / "refs" / name, (time.time() - 2 * 86_400,) * 2)


def test_only_objects_without_a_reference_are_collected(store):
    source, loose = store.put_bytes("source", b"source"), store.put_bytes("text", b"loose")
    _, record = made(store, "read", b"result", source)
    tagged = store.put_bytes("text", b"tagged")
    store.set_tag("best", tagged, after=None)
    bundle = store.put_bundle(small_bundle())
    done = collect(store)
    assert (done.objects, done.size, done.references) == ([loose.digest], 5, [])
    assert not store.has(loose.digest)
    assert store.digests() == sorted(ref.digest for ref in (source, record.results["text"], tagged, bundle))
    assert check_store(store, full=True).problems == []
    assert collect(store).objects == []


def test_a_dry_run_changes_nothing_and_says_the_same(store):
    store.put_bytes("text", b"loose")
    made(store, "read", b"result")
    returned = store.put_bytes("text", b"lost for a while")
    tag = store.set_tag("best", returned, after=None)
    store.objects.retire(returned.digest)
    age(store)
    planned = collect(store, unnamed=True, dry_run=True)
    assert len(store.digests()) == 2
    assert planned.returned == [returned.digest]
    assert collect(store, unnamed=True) == planned
    assert store.digests() == [tag.digest]


def test_what_is_named_again_comes_back_from_quarantine(store):
    one = store.put_bytes("text", b"one")
    collect(store)
    assert not store.has(one.digest)
    assert store.read_bytes(one) == b"one"  # a reader who comes late
    store.set_tag("best", one, after=None)
    assert store.has(one.digest)
    assert collect(store).objects == []


def test_the_quarantine_is_purged_after_its_days(store):
    one = store.put_bytes("text", b"one")
    collect(store)
    today = datetime.now(UTC).date()
    folder = store.root / "quarantine" / today.isoformat()
    folder.rename(folder.with_name((today - timedelta(days=7)).isoformat()))
    assert collect(store, keep_days=7).purged == []
    assert store.read_bytes(one) == b"one"
    assert len(collect(store, keep_days=6, dry_run=True).purged) == 1
    assert len(collect(store, keep_days=6).purged) == 1
    with pytest.raises(StoreError) as caught:
        store.set_tag("best", one, after=None)
    assert caught.value.code == "missing"


def test_unnamed_steps_go_and_what_a_run_was_made_from_stays(store):
    raw = store.put_bytes("source", b"raw")
    _, first = made(store, "read", b"read", raw)
    key, second = made(store, "train", b"trained", first.results["text"])
    store.name_run("demo", "train", key, second)
    other, _ = made(store, "other", b"other", raw)
    assert collect(store).objects == []
    age(store)
    done = collect(store, unnamed=True)
    assert done.references == [f"steps/{other}"]
    assert len(done.objects) == 1
    assert store.recall(key) == second
    assert store.read_bytes(raw) == b"raw"
    store.forget("demo")
    assert store.runs() == []
    assert len(collect(store, unnamed=True).objects) == 3
    assert store.digests() == []


def test_what_a_young_step_was_made_from_is_spared_with_it(store):
    """A step at work names its results at its end, and then its lineage has to be whole."""
    prepared, first = made(store, "read", b"read", store.put_bytes("source", b"raw"))
    age(store)
    key, second = made(store, "train", b"trained", first.results["text"])
    done = collect(store, unnamed=True)
    assert done.references == []
    assert set(done.spared) == {f"steps/{prepared}", f"steps/{key}"}
    store.name_run("demo", "train", key, second)
    assert store.select(["demo"]) == [*sorted([f"steps/{prepared}", f"steps/{key}"]), "runs/demo/train"]


def test_a_tag_keeps_what_its_bundle_was_made_from(store):
    raw = store.put_bytes("source", b"raw")
    recipe = {"source": {"kind": "source", "digest": raw.digest}}
    record = StepRecord("train", 1, recipe, {"model": store.put_bundle(small_bundle())}, 1.0)
    key = step_key("train", 1, recipe)
    store.remember(key, record)
    store.set_tag("best", record.results["model"], after=None)
    assert collect(store, unnamed=True).references == []
    assert store.artifacts() == {small_bundle().artifact_id: record.results["model"]}
    store.set_tag("best", None, after=store.tag("best"))
    age(store)
    assert sorted(collect(store, unnamed=True).references) == sorted(
        [f"artifacts/{small_bundle().artifact_id}", f"steps/{key}"]
    )


def test_a_reference_that_cannot_be_read_stops_the_collection(store):
    key, _ = made(store, "read", b"result")
    path = store.root / "refs" / "steps" / key
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b'"seconds":1.0', b'"seconds":2.0'))
    with pytest.raises(StoreError) as caught:
        collect(store)
    assert caught.value.code == "damaged-reference"
    assert len(store.digests()) == 1


def test_what_killed_processes_left_is_deleted(store):
    (store.root / "tmp").mkdir(exist_ok=True)
    left, fresh = (store.root / "tmp" / f".staged.{number}.tmp" for number in (1, 2))
    for path in (left, fresh):
        path.write_bytes(b"half")
    os.utime(left, (0, 0))
    assert collect(store).temporary == [left]  # the other one may be of a writer at work
    assert os.listdir(store.root / "tmp") == [fresh.name]
    assert collect(store, keep_days=0).temporary == [fresh]


def test_a_staged_file_that_vanishes_meanwhile_is_no_error(store, monkeypatch):
    (store.root / "tmp").mkdir(exist_ok=True)
    left = store.root / "tmp" / ".staged.1.tmp"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    monkeypatch.setattr(store.objects, "quarantined", lambda before: left.unlink(missing_ok=True) or [])
    assert collect(store).temporary == [left]  # vanished when it was to be deleted
    (store.root / "tmp" / ".staged.2.tmp").write_bytes(b"half")
    lstat = Path.lstat
    monkeypatch.setattr(Path, "lstat", lambda path: (path.unlink(missing_ok=True), lstat(path))[1])
    assert collect(store).temporary == []  # when it was looked at


def test_what_is_published_slowly_keeps_no_writer_and_no_collector_waiting(store):
    data, read = b"from afar", threading.Event()

    def slowly():
        yield data[:4]
        collect(store)
        store.put_bytes("text", b"of somebody else")
        read.set()
        yield data[4:]

    digest = hashlib.sha256(data).hexdigest()
    download = threading.Thread(target=store.adopt_object, args=(digest, slowly(), len(data)), daemon=True)
    download.start()
    download.join(20)
    assert read.is_set()
    assert store.objects.read(digest) == data


def test_references_that_come_back_bring_their_objects_back_before_these_are_purged(store):
    key, record = made(store, "read", b"result", store.put_bytes("source", b"source"))
    store.name_run("demo", "read", key, record)
    shutil.copytree(store.root / "refs", store.root.parent / "backup")
    store.forget("demo")
    age(store)
    assert len(collect(store, unnamed=True).objects) == 2
    shutil.rmtree(store.root / "refs")
    shutil.copytree(store.root.parent / "backup", store.root / "refs")
    problems = check_store(store).problems
    assert {problem.code for problem in problems} == {"quarantined"}
    assert all("`riftco store gc` brings it back" in problem.message for problem in problems)
    (folder,) = (store.root / "quarantine").iterdir()
    folder.rename(folder.with_name("2001-01-01"))
    done = collect(store)
    assert (len(done.returned), len(done.purged)) == (2, 1)
    assert check_store(store, full=True).problems == []


LOST = [
    *(
        (folder, instead)
        for folder in ("refs/runs", "refs/tags")
        for instead in ("a link", "a file", "nothing")
    ),
    ("refs", "nothing"),
    ("refs/runs/demo", "a link"),
]


@pytest.mark.parametrize(("folder", "instead"), LOST)
def test_nothing_is_collected_while_a_folder_of_references_is_lost(store, folder, instead):
    key, record = made(store, "read", b"result")
    store.name_run("demo", "read", key, record)
    store.set_tag("best", record.results["text"], after=None)
    age(store)
    path, away = store.root / folder, store.root.parent / "away"
    path.rename(away)
    if instead == "a link":
        path.symlink_to("/nowhere")
    elif instead == "a file":
        path.write_text("x")
    with pytest.raises(StoreError, match=f"{folder}.* bring it back"):
        collect(store, unnamed=True)
    problems = check_store(store, full=True).problems
    assert any(problem.code == "lost-folder" and folder in problem.where for problem in problems)
    path.unlink(missing_ok=True)
    away.rename(path)
    assert check_store(store, full=True).problems == []
    assert collect(store, unnamed=True).references == []


def test_a_step_at_work_loses_no_reference_to_a_collection(store):
    """What it puts at its start is named only at its end."""
    bundle = store.put_bundle(small_bundle())
    age(store)
    store.put_bundle(small_bundle())  # put again, so wanted again
    key, record = made(store, "train", b"result")
    done = collect(store, unnamed=True)
    assert (done.references, done.objects) == ([], [])
    assert done.spared == [f"artifacts/{small_bundle().artifact_id}", f"steps/{key}"]
    assert store.recall(key) == record
    assert store.resolve(small_bundle().artifact_id) == bundle
    assert len(collect(store, unnamed=True, keep_days=0).references) == 2


def test_an_object_needs_no_reference_between_put_and_remember(store):
    """A collection between the two moves the object away; the reference brings it back."""
    ref = store.put_bytes("text", b"result")
    collect(store)
    key = step_key("read", 1, {})
    record = StepRecord("read", 1, {}, {"text": ref}, 1.0)
    assert store.remember(key, record) == record
    assert check_store(store, full=True).problems == []
    with pytest.raises(StoreError, match="missing"):
        store.remember(key, replace(record, results={"text": Ref("text", "0" * 64)}))


@pytest.mark.parametrize("unnamed", [False, True])
@pytest.mark.parametrize("kind", ["steps", "artifacts", "runs", "tags"])
def test_any_damaged_reference_stops_a_collection_before_it_removes_anything(store, kind, unnamed):
    raw = store.put_bytes("source", b"raw")
    key, record = made(store, "read", b"result", raw)
    store.name_run("demo", "read", key, record)
    store.set_tag("best", record.results["text"], after=None)
    store.put_bundle(small_bundle())
    store.put_bytes("text", b"loose")
    name = next(name for name in store.reference_names() if name.startswith(kind))
    path = store.root / "refs" / name
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-9] + b'f"}')
    before = (store.reference_names(), store.digests())
    with pytest.raises(StoreError, match=f"{name} is damaged") as caught:
        collect(store, unnamed=unnamed)
    assert caught.value.code == "damaged-reference"
    assert (store.reference_names(), store.digests()) == before


def test_only_files_of_ours_are_deleted(store, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (store.root / "tmp" / "folder").mkdir(parents=True)
    (store.root / "tmp" / "link").symlink_to(outside)
    for name in ("0001-01-01", "notes", "1999-99-99", "0000-first"):
        (store.root / "quarantine" / name).mkdir(parents=True)
    (store.root / "quarantine" / "0002-02-02").write_text("a file")
    (store.root / "quarantine" / "0003-03-03").symlink_to(tmp_path)
    done = collect(store)
    assert done.temporary == []
    assert [path.name for path in done.purged] == ["0001-01-01"]
    assert sorted(os.listdir(store.root / "tmp")) == ["folder", "link"]
    assert outside.read_text() == "mine"
    assert len(os.listdir(store.root / "quarantine")) == 5


def test_without_days_to_keep_what_is_collected_goes_for_good(store):
    one = store.put_bytes("text", b"one")
    (folder,) = collect(store, keep_days=0).purged
    assert folder.name == datetime.now(UTC).date().isoformat()
    with pytest.raises(StoreError, match="missing"):
        store.read_bytes(one)


@pytest.mark.parametrize("days", [-1, 36_501, 10**12])
def test_days_to_keep_are_bounded(store, days):
    with pytest.raises(ValueError, match=str(days)):
        collect(store, keep_days=days)
    assert collect(store, keep_days=36_500).purged == []


def test_an_object_in_a_wrong_place_is_left_to_fsck(store):
    digest = store.put_bytes("text", b"one").digest
    wrong = store.root / "objects" / "sha256" / "zz" / digest
    wrong.parent.mkdir()
    store.objects.path(digest).rename(wrong)
    assert store.digests() == []
    assert collect(store).objects == []
    assert [problem.code for problem in check_store(store).problems] == ["stray"]
