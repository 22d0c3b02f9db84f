"""Checking a store: every kind of damage is found and named, and a sound store is clean."""

import os

import pytest

from artifacts import StepRecord, Store, step_key
from artifacts.fsck import check_store
from artifacts.records import encode_ref, seal, unseal
from tests.artifacts.bundles import small_bundle
from tests.artifacts.checkpoints import small_checkpoint

KEY = step_key("train", 1, {})


@pytest.fixture
def store(tmp_path) -> Store:
    store = Store.open(tmp_path / "store", durability="none")
    record = StepRecord("train", 1, {}, {"model": store.put_bundle(small_bundle())}, 1.0)
    store.name_run("demo", "train", KEY, store.remember(KEY, record))
    store.set_tag("best", record.results["model"], after=None)
    store.put_bytes("text", b"loose")
    return store


def found(store: Store, *, full: bool = False) -> set[tuple[str, str]]:
    return {(problem.code, problem.where) for problem in check_store(store, full=full).problems}


def test_a_sound_store_is_clean_and_counted(store):
    checked = check_store(store, full=True)
    assert (checked.objects, checked.references, checked.problems) == (2, 4, [])
    assert checked.size == len(small_bundle().to_bytes()) + 5


def test_changed_bytes_are_found_by_hashing_only(store):
    ref = store.resolve("best")
    path = store.path(ref)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert found(store) == set()
    assert found(store, full=True) == {("damaged", ref.digest)}


def test_a_changed_size_is_found_without_hashing(store):
    ref = store.resolve("best")
    store.path(ref).chmod(0o644)
    store.path(ref).write_bytes(b"short")
    assert found(store) == {("damaged", ref.digest)}


def test_a_missing_object_is_found_by_every_reference_to_it(store):
    ref = store.resolve("best")
    store.path(ref).unlink()
    names = {f"artifacts/{small_bundle().artifact_id}", f"steps/{KEY}", "runs/demo/train", "tags/best"}
    assert found(store) == {("missing", name) for name in names}


@pytest.mark.parametrize("name", [f"steps/{KEY}", "runs/demo/train", "tags/best"])
def test_every_changed_byte_of_a_reference_is_found(store, name):
    path = store.root / "refs" / name
    data = path.read_bytes()
    path.chmod(0o644)
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert found(store) == {("damaged-reference", name)}
    path.write_bytes(b"")
    assert found(store) == {("damaged-reference", name)}


def test_a_record_under_another_key_is_found(store):
    other = step_key("train", 2, {})
    os.link(store.root / "refs" / "steps" / KEY, store.root / "refs" / "steps" / other)
    assert found(store) == {("damaged-reference", f"steps/{other}")}


def test_files_that_are_no_objects_or_references_are_found(store):
    stray = store.root / "objects" / "sha256" / "ab" / "note.txt"
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("x")
    link = store.root / "objects" / "sha256" / "ab" / ("ab" + "0" * 62)
    link.symlink_to(stray)
    (store.root / "refs" / "tags" / "a b").write_text("x")
    assert found(store) >= {("stray", str(stray)), ("stray", str(link)), ("bad-name", "tags/a b")}


def test_files_that_are_in_no_place_of_a_reference_are_found(store):
    strays = [store.root / "refs" / name for name in ("note", "runs/oops")]
    for stray in strays:
        stray.write_text("x")
    (store.root / "refs" / "extra").mkdir()
    (store.root / "refs" / ".DS_Store").write_text("")
    assert found(store) == {("stray", str(path)) for path in (*strays, store.root / "refs" / "extra")}


def test_progress_counts_the_bytes_hashed(store):
    seen = []
    checked = check_store(
        store, full=True, progress=lambda done, total, what: seen.append((done, total, what))
    )
    assert seen[-1] == (checked.size, checked.size, "bytes")
    assert len(seen) == checked.objects


def test_an_artifact_under_the_id_of_another_is_found_by_reading_its_manifest(store):
    other = small_bundle(5)
    name = f"artifacts/{other.artifact_id}"
    os.link(store.root / "refs" / "artifacts" / small_bundle().artifact_id, store.root / "refs" / name)
    assert found(store) == set()
    assert found(store, full=True) == {("damaged-reference", name)}


def test_an_artifact_that_is_no_bundle_is_found(store):
    ref = store.put_bytes("bundle", b"no bundle")
    name = f"artifacts/{'a' * 64}"
    store.references.create(name, encode_ref(ref, 9))
    assert found(store, full=True) == {("damaged-reference", name)}


def test_a_checkpoint_is_known_by_its_id(store):
    store.put_checkpoint(small_checkpoint())
    assert found(store, full=True) == set()
    name = f"artifacts/{'a' * 64}"
    os.link(store.root / "refs" / "artifacts" / small_checkpoint().checkpoint_id, store.root / "refs" / name)
    assert found(store, full=True) == {("damaged-reference", name)}


def test_a_record_whose_recipe_has_another_key_is_found_and_not_recalled(store):
    content = unseal(store.read_reference(f"steps/{KEY}") or b"")
    store.references.replace(f"steps/{KEY}", seal(content | {"recipe": {"rate": 1}}))
    assert found(store) == {("damaged-reference", f"steps/{KEY}")}
    assert store.recall(KEY) is None
