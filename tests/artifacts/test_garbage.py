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
