"""The store as its users see it: put, recall, name, and what it promises about damage."""

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from artifacts import BundleError, Ref, RunStage, StepRecord, Store, StoreError, step_key
from tests.artifacts.bundles import small_bundle
from tests.artifacts.checkpoints import small_checkpoint

KEY = step_key("train", 1, {"rate": 0.5})


@pytest.fixture
def store(tmp_path) -> Store:
    return Store.open(tmp_path / "store", durability="none")


def record_of(store: Store, data: bytes = b"result", seconds: float = 1.0) -> StepRecord:
    return StepRecord("train", 1, {"rate": 0.5}, {"text": store.put_bytes("text", data)}, seconds)


def damage(store: Store, ref: Ref) -> None:
    path = store.path(ref)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def code_of(call, *arguments) -> str:
    with pytest.raises(StoreError) as caught:
        call(*arguments)
    return caught.value.code


def test_bytes_files_and_bundles_are_put_and_read(store, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(bytes(3_000_000))
    bundle = small_bundle()
    refs = [store.put_bytes("text", b"abc"), store.put_file("data", source), store.put_bundle(bundle)]
    assert [ref.kind for ref in refs] == ["text", "data", "bundle"]
    assert store.read_bytes(refs[0]) == b"abc"
    assert store.path(refs[1]).read_bytes() == bytes(3_000_000)
    assert store.load_bundle(refs[2]) == bundle
    assert store.path(refs[2]).read_bytes() == bundle.to_bytes()
    assert store.artifacts() == {bundle.artifact_id: refs[2]}
    assert store.digests() == sorted(ref.digest for ref in refs)
    for ref in refs:
        store.check(ref)
        assert ref.uri == store.path(ref).as_uri()


def test_a_source_file_that_cannot_be_read_is_the_callers_error(store, tmp_path):
    with pytest.raises(FileNotFoundError):
        store.put_file("text", tmp_path / "absent")
    with pytest.raises(IsADirectoryError):
        store.put_file("text", tmp_path)


def test_a_bad_kind_stores_nothing(store):
    assert code_of(store.put_bytes, "a/b", b"x") == "bad-name"
    assert store.digests() == []


def test_only_bundles_are_loaded_as_bundles(store):
    assert code_of(store.load_bundle, store.put_bytes("text", b"x")) == "wrong-kind"
    with pytest.raises(BundleError):
        store.load_bundle(store.put_bytes("bundle", b"x"))


def test_checkpoints_are_put_under_their_ids_and_read(store):
    checkpoint = small_checkpoint()
    ref = store.put_checkpoint(checkpoint)
    assert (ref.kind, store.load_checkpoint(ref)) == ("checkpoint", checkpoint)
    assert store.artifacts() == {checkpoint.checkpoint_id: ref}
    assert store.resolve(checkpoint.checkpoint_id[:12]) == ref
    assert code_of(store.load_bundle, ref) == "wrong-kind"
    assert code_of(store.load_checkpoint, store.put_bundle(small_bundle())) == "wrong-kind"


def test_missing_objects_are_reported_by_every_reader(store):
    ref = Ref("bundle", "0" * 64)
    for call in (store.path, store.read_bytes, store.check, store.load_bundle):
        assert code_of(call, ref) == "missing"


def test_a_damaged_bundle_is_noticed_and_repaired_by_putting_it_again(store):
    bundle = small_bundle()
    ref = store.put_bundle(bundle)
    damage(store, ref)
    for call in (store.read_bytes, store.check, store.load_bundle):
        assert code_of(call, ref) == "damaged"
    assert store.put_bundle(bundle) == ref
    assert store.load_bundle(ref) == bundle


def test_an_intact_bundle_under_a_wrong_name_is_damage(store):
    one, two = (store.put_bundle(small_bundle(seed)) for seed in (1, 2))
    store.path(one).chmod(0o644)
    store.path(one).write_bytes(store.read_bytes(two))
    assert code_of(store.load_bundle, one) == "damaged"


def test_a_damaged_artifact_reference_is_repaired_by_putting_the_bundle_again(store):
    bundle = small_bundle()
    ref = store.put_bundle(bundle)
    path = store.root / "refs" / "artifacts" / bundle.artifact_id
    path.chmod(0o644)
    path.write_bytes(b"{")
    assert store.artifacts() == {}
    store.put_bundle(bundle)
    assert store.artifacts() == {bundle.artifact_id: ref}


def test_a_step_is_recalled_by_its_key(store):
    assert store.recall(KEY) is None
    record = record_of(store)
    assert store.remember(KEY, record) == record
    assert store.recall(KEY) == record
    assert store.steps() == {KEY: record}
    recalled = store.recall(KEY)
    assert recalled is not None
    assert recalled.results["text"].uri == store.path(record.results["text"]).as_uri()


def test_the_first_record_of_a_key_stands(store):
    first = record_of(store, b"first")
    store.remember(KEY, first)
    assert store.remember(KEY, record_of(store, b"second")) == first
    assert store.recall(KEY) == first


@pytest.mark.parametrize("trouble", ["missing", "damaged"])
def test_a_record_whose_object_is_gone_gives_way(store, trouble):
    first = record_of(store, b"first")
    store.remember(KEY, first)
    if trouble == "missing":
        store.path(first.results["text"]).unlink()
    else:
        damage(store, first.results["text"])
    second = record_of(store, b"second")
    assert store.remember(KEY, second) == second
    assert store.recall(KEY) == second


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"key":1}', b"\xff"])
def test_a_damaged_record_counts_as_none_and_is_written_again(store, data):
    record = record_of(store)
    store.remember(KEY, record)
    path = store.root / "refs" / "steps" / KEY
    path.chmod(0o644)
    path.write_bytes(data)
    assert store.recall(KEY) is None
    assert store.steps() == {}
    store.remember(KEY, record)
    assert store.recall(KEY) == record


def test_a_record_under_another_key_counts_as_none(store):
    store.remember(KEY, record_of(store))
    other = step_key("train", 2, {})
    shutil.copy(store.root / "refs" / "steps" / KEY, store.root / "refs" / "steps" / other)
    assert store.recall(other) is None


def test_a_record_of_absent_objects_is_not_kept(store):
    record = replace(record_of(store), results={"text": Ref("text", "0" * 64)})
    assert code_of(store.remember, KEY, record) == "missing"
    assert code_of(store.name_run, "demo", "train", KEY, record) == "missing"
    assert store.recall(KEY) is None
    assert store.runs() == []


@pytest.mark.parametrize("key", ["", "short", "../../../outside", "A" * 64])
def test_a_key_must_be_a_digest(store, key):
    with pytest.raises(ValueError, match="step key"):
        store.recall(key)
    with pytest.raises(ValueError, match="step key"):
        store.remember(key, record_of(store))
    with pytest.raises(ValueError, match="step key"):
        store.name_run("demo", "train", key, record_of(store))


def test_a_run_names_its_stages(store):
    assert store.runs() == []
    assert store.run_stages("demo") == {}
    record = record_of(store)
    for run, stage in (("demo", "train"), ("demo", "corpus"), ("other", "train")):
        store.name_run(run, stage, KEY, record)
    assert store.runs() == ["demo", "other"]
    assert list(store.run_stages("demo")) == ["corpus", "train"]
    assert store.run_stages("demo")["train"].key == KEY
    assert store.run_stages("demo")["train"].record == record


def test_a_name_moves_to_the_newest_step(store):
    other = step_key("train", 1, {"rate": 0.25})
    store.name_run("demo", "train", KEY, record_of(store, b"first"))
    store.name_run("demo", "train", other, record_of(store, b"second"))
    assert store.run_stages("demo")["train"] == RunStage(other, record_of(store, b"second"), previous=KEY)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b", "a\0"])
def test_names_cannot_leave_their_folder(store, name):
    assert code_of(store.name_run, name, "train", KEY, record_of(store)) == "bad-name"
    assert code_of(store.name_run, "demo", name, KEY, record_of(store)) == "bad-name"
    assert code_of(store.run_stages, name) == "bad-name"


def test_a_folder_that_no_run_made_is_overlooked(store):
    (store.root / "refs" / "runs" / "new folder").mkdir(parents=True)
    assert store.runs() == []
    assert code_of(store.resolve, "new folder/train") == "unknown"


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_same_work_under_two_roots_gives_the_same_store(tmp_path):
    for root in ("here", "far/away/and/longer"):
        store = Store.open(tmp_path / root, durability="none")
        store.put_bundle(small_bundle())
        record = store.remember(KEY, record_of(store))
        store.name_run("demo", "train", KEY, record)
    assert files_of(tmp_path / "here") == files_of(tmp_path / "far/away/and/longer")


def test_a_moved_store_works_and_knows_where_it_is(store, tmp_path):
    bundle = small_bundle()
    record = replace(record_of(store), results={"model": store.put_bundle(bundle)})
    store.name_run("demo", "train", KEY, store.remember(KEY, record))
    shutil.move(store.root, tmp_path / "moved")
    moved = Store.open(tmp_path / "moved")
    ref = moved.resolve("demo/train")
    assert moved.load_bundle(ref) == bundle
    assert ref.uri == (tmp_path / "moved" / "objects" / "sha256" / ref.digest[:2] / ref.digest).as_uri()
    assert moved.recall(KEY) == record


def test_a_store_can_be_sent_to_another_process(store):
    ref = store.put_bytes("text", b"x")
    assert pickle.loads(pickle.dumps(store)).read_bytes(ref) == b"x"


def test_a_record_is_only_kept_under_the_key_of_its_recipe(store):
    with pytest.raises(ValueError, match="step key"):
        store.remember(step_key("train", 1, {"rate": 1}), record_of(store))
    assert store.steps() == {}
