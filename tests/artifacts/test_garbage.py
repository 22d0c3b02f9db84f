"""Garbage collection: what no reference reaches goes, everything else stays, and late-comers lose nothing."""

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta

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
    planned = collect(store, unnamed=True, dry_run=True)
    assert len(store.digests()) == 2
    assert collect(store, unnamed=True) == planned
    assert store.digests() == []


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
    done = collect(store, unnamed=True)
    assert done.references == [f"steps/{other}"]
    assert len(done.objects) == 1
    assert store.recall(key) == second
    assert store.read_bytes(raw) == b"raw"
    store.forget("demo")
    assert store.runs() == []
    assert len(collect(store, unnamed=True).objects) == 3
    assert store.digests() == []


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
    left = store.root / "tmp" / ".staged.1.tmp"
    left.write_bytes(b"half")
    assert collect(store).temporary == [left]
    assert os.listdir(store.root / "tmp") == []


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
