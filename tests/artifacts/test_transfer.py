"""Push and pull: what goes along, what is skipped, what stands, and what is never made worse."""

import os
import shutil
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from artifacts import Ref, Store, StoreError
from artifacts.archive import export, import_
from artifacts.garbage import collect
from artifacts.records import seal
from artifacts.remote import RemoteStore
from artifacts.transfer import Transferred, pull, push
from tests.artifacts.bundles import small_bundle
from tests.artifacts.remote_stores import contents, finish, full_store


@pytest.fixture(params=["memory", "file"])
def remote(request, tmp_path) -> RemoteStore:
    MemoryFileSystem.store.clear()
    url = "memory://stores/one" if request.param == "memory" else f"file://{tmp_path}/remote"
    return RemoteStore.open(url, writable=True)


@pytest.fixture
def source(tmp_path) -> Store:
    return full_store(tmp_path / "source")


@pytest.fixture
def target(tmp_path) -> Store:
    return Store.open(tmp_path / "target", durability="none")


def code_of(call, *arguments) -> str:
    with pytest.raises(StoreError) as caught:
        call(*arguments)
    return caught.value.code


def there(remote: RemoteStore) -> dict[str, bytes]:
    keys = [key for key, _ in remote._bucket.sizes("") if key.startswith(("objects/", "refs/"))]
    found = {key: remote._bucket.read(key) for key in keys}
    return {key: value[0] for key, value in found.items() if value}


def damage(path: Path, data: bytes | None = None) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"?" if data is None else data)


def test_a_store_pushed_and_pulled_is_the_same_store(source, remote, target):
    objects = [name for name in contents(source.root) if name.startswith("objects")]
    size = sum(len(contents(source.root)[name]) for name in objects)
    references = len(contents(source.root)) - len(objects)
    assert push(source, remote) == Transferred(len(objects), size, references, 0)
    assert there(remote) == contents(source.root)
    assert pull(target, remote) == Transferred(len(objects), size, references, 0)
    assert contents(target.root) == contents(source.root)
    assert target.load_bundle(target.resolve("best")) == source.load_bundle(source.resolve("demo/pretrain"))


def test_a_lost_store_is_pulled_back(source, remote):
    before, digests = contents(source.root), source.digests()
    push(source, remote)
    shutil.rmtree(source.root)
    again = Store.open(source.root, durability="none")
    pull(again, remote)
    assert again.digests() == digests
    assert contents(again.root) == before


def test_what_is_there_is_skipped(source, remote, target):
    push(source, remote)
    pull(target, remote)
    count = len(contents(source.root))
    assert push(source, remote) == Transferred(0, 0, 0, count)
    assert pull(target, remote) == Transferred(0, 0, 0, count)
    assert push(target, remote) == Transferred(0, 0, 0, count)


@pytest.mark.parametrize("direction", ["push", "pull"])
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("demo", {"artifacts": 1, "steps": 2, "runs": 2, "tags": 0}),
        ("runs/demo", {"artifacts": 1, "steps": 2, "runs": 2, "tags": 0}),
        ("demo/pretrain", {"artifacts": 1, "steps": 2, "runs": 1, "tags": 0}),
        ("demo/corpus", {"artifacts": 0, "steps": 1, "runs": 1, "tags": 0}),
        ("best", {"artifacts": 1, "steps": 2, "runs": 0, "tags": 1}),
    ],
)
def test_a_name_brings_all_that_it_was_made_from_and_nothing_else(
    source, remote, target, direction, name, kinds
):
    finish(source, "other", "corpus", {"inputs": {}, "config": 1}, source.put_bytes("text", b"other words"))
    push(source, remote, [name] if direction == "push" else [])
    pull(target, remote, [name] if direction == "pull" else [])
    got = target.reference_names()
    assert {kind: sum(name.startswith(kind) for name in got) for kind in kinds} == kinds
    assert len(target.digests()) == (1 if name == "demo/corpus" else 2)
    if direction == "push":
        assert there(remote).keys() == contents(target.root).keys()


def test_an_artifact_is_pulled_by_the_first_digits_of_its_id(source, remote, target):
    push(source, remote)
    (artifact,) = source.artifacts()
    pull(target, remote, [artifact[:8]])
    assert list(target.artifacts()) == [artifact]
    assert len(target.steps()) == 2
    assert target.runs() == []


def test_an_unknown_name_is_an_error_that_says_where(source, remote, target):
    push(source, remote)
    with pytest.raises(StoreError, match=f"{remote.url}.*'nobody'.*demo") as caught:
        pull(target, remote, ["demo", "nobody"])
    assert caught.value.code == "unknown"
    assert contents(target.root) == {}
    assert code_of(push, source, remote, ["nobody"]) == "unknown"
    assert code_of(pull, target, remote, ["abcdef"]) == "unknown"


def test_a_result_that_a_stage_does_not_have_is_unknown(source, remote, target):
    push(source, remote, ["demo/pretrain/result"])
    for name in ("demo/pretrain/typo", "demo/pretrain/result/more"):
        assert code_of(push, source, remote, [name]) == "unknown"
        assert code_of(pull, target, remote, [name]) == "unknown"
    assert contents(target.root) == {}


@pytest.mark.parametrize("direction", ["push", "pull"])
@pytest.mark.parametrize("names", [[], ["best"], ["demo"]])
@pytest.mark.parametrize("turn", [0, 1])
def test_a_name_that_moves_while_it_is_copied_comes_with_all_it_was_made_from(
    source, remote, target, monkeypatch, direction, names, turn
):
    writer, turns = Store.open(source.root, durability="none"), iter(range(9))
    reader = source if direction == "push" else remote
    list_names = reader.reference_names

    def others_write_after_a_listing():
        found = list_names()
        if next(turns) == turn:
            inputs = {"before": {"kind": "bundle", "digest": writer.resolve("demo/pretrain").digest}}
            model = writer.put_bundle(small_bundle(7))
            finish(writer, "demo", "pretrain", {"inputs": inputs}, model)
            writer.set_tag("best", model, writer.tag("best"))
            if direction == "pull":
                push(writer, RemoteStore.open(remote.url, writable=True))
        return found

    push(source, remote)
    monkeypatch.setattr(reader, "reference_names", others_write_after_a_listing)
    if direction == "push":
        push(source, remote, names)
    pull(target, remote, names)
    stages = target.run_stages("demo").values()
    named = [*target.tags().values(), *(ref for made in stages for ref in made.record.results.values())]
    made = {ref for record in target.steps().values() for ref in record.results.values()}
    assert named
    assert set(named) <= made
    assert {ref for ref in named if ref.kind == "bundle"} <= set(target.artifacts().values())


def test_names_that_are_not_asked_for_are_not_read(source, remote, target, monkeypatch):
    finish(source, "other", "corpus", {"inputs": {}, "config": 1}, source.put_bytes("text", b"other words"))
    push(source, remote)
    read, seen = remote.read_reference, []
    monkeypatch.setattr(remote, "read_reference", lambda name: (seen.append(name), read(name))[1])
    pull(target, remote, ["demo/corpus"])
    assert [name for name in seen if name.startswith(("runs/", "tags/"))] == [
        "runs/demo/corpus",
        "runs/demo/pretrain",
    ]


def test_progress_counts_the_bytes_of_all_objects(source, remote, target):
    total = sum(source.path(source.ref("object", digest)).stat().st_size for digest in source.digests())
    for transfer, store in ((push, source), (push, source), (pull, target), (pull, target)):
        seen: list[tuple[int, int, str]] = []
        transfer(store, remote, [], lambda *what, seen=seen: seen.append(what))
        done = [count for count, _, _ in seen]
        assert done == sorted(done)
        assert done[-1] == total
        assert {whole for _, whole, _ in seen} == {total}
        assert {what for _, _, what in seen} == {*source.digests(), *source.reference_names()}


# Damage


def test_a_damaged_local_object_is_not_pushed(source, remote):
    damage(source.path(source.resolve("best")))
    assert code_of(push, source, remote) == "damaged"
    assert [name for name in there(remote) if "refs/" in name] == []


def test_a_missing_local_object_is_named_unless_it_is_there_already(source, remote):
    ref = source.resolve("best")
    path, saved = source.path(ref), source.read_bytes(ref)
    path.unlink()
    assert code_of(push, source, remote) == "missing"
    path.write_bytes(saved)
    push(source, remote)
    path.unlink()
    push(source, remote)


def references_of(source: Store) -> list[str]:
    """One of each kind."""
    return [next(n for n in source.reference_names() if n.startswith(k)) for k in ("a", "s", "r", "t")]


@pytest.mark.parametrize("kind", range(4))
def test_a_damaged_local_reference_is_named_and_nothing_is_pushed(source, remote, kind):
    name = references_of(source)[kind]
    damage(source.root / "refs" / name)
    with pytest.raises(StoreError, match=f"{name} is damaged.*again.*delete") as caught:
        push(source, remote)
    assert caught.value.code == "damaged-reference"
    assert there(remote) == {}


def test_a_damaged_reference_stops_what_it_may_belong_to_and_nothing_else(source, remote, target):
    push(source, remote)
    name = "runs/demo/corpus"
    damage(source.root / "refs" / name)
    remote.replace_reference(name, b"{")
    push(source, remote, ["demo/pretrain"])
    pull(target, remote, ["demo/pretrain"])
    assert code_of(push, source, remote, ["demo"]) == "damaged-reference"
    assert code_of(pull, target, remote, ["demo"]) == "damaged-reference"
    step = references_of(source)[1]
    damage(source.root / "refs" / step)
    remote.replace_reference(step, b"{")
    assert code_of(push, source, remote, ["demo/pretrain"]) == "damaged-reference"
    assert code_of(pull, target, remote, ["demo/pretrain"]) == "damaged-reference"


def test_a_damaged_local_object_is_repaired_by_a_pull(source, remote, target):
    push(source, remote)
    pull(target, remote)
    damage(target.path(target.resolve("best")))
    assert pull(target, remote).objects == 1
    assert target.load_bundle(target.resolve("best"))


@pytest.mark.parametrize("change", ["same size", "shorter", "longer", "gone"])
def test_a_damaged_remote_object_never_arrives(source, remote, target, change):
    push(source, remote)
    ref = source.resolve("best")
    key, data = f"objects/sha256/{ref.digest[:2]}/{ref.digest}", source.read_bytes(ref)
    changed = {"same size": data[:-1] + b"?", "shorter": data[:-1], "longer": data + b"?"}
    if change == "gone":
        remote._bucket.remove(key)
    else:
        remote._bucket.write(key, changed[change])
    with pytest.raises(StoreError, match=f"{ref.digest} at {remote.url}.*push again") as caught:
        pull(target, remote)
    assert caught.value.code == ("missing" if change == "gone" else "damaged")
    assert not target.has(ref.digest)
    assert target.reference_names() == []
    assert os.listdir(target.root / "tmp") == []
    if change == "same size":
        remote._bucket.remove(key)  # what the message says
    push(source, remote)
    pull(target, remote)
    assert contents(target.root) == contents(source.root)


@pytest.mark.parametrize("change", ["gone", "shorter"])
@pytest.mark.parametrize("name", ["demo/corpus", "best"])
def test_what_is_lost_there_is_not_missed_where_it_is_intact(source, remote, target, change, name):
    push(source, remote)
    pull(target, remote)
    digest = source.resolve(name).digest
    key = f"objects/sha256/{digest[:2]}/{digest}"
    remote._bucket.remove(key)
    if change == "shorter":
        remote._bucket.write(key, b"x")
    assert pull(target, remote, ["demo/pretrain"]).objects == 0
    damage(target.path(target.ref("object", digest)))
    code = code_of(pull, target, remote, ["demo/pretrain"])
    assert code == ("missing" if change == "gone" else "damaged")


def test_a_missing_remote_object_is_not_to_be_removed(source, remote, target):
    push(source, remote)
    digest = source.resolve("best").digest
    remote._bucket.remove(f"objects/sha256/{digest[:2]}/{digest}")
    with pytest.raises(StoreError, match=f"{digest} at {remote.url} is missing: push again") as caught:
        pull(target, remote)
    assert caught.value.code == "missing"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{}", seal({}), seal({"digest": "../../x", "size": 1, "kind": "x"})]
)
def test_a_damaged_remote_reference_is_named_and_mended_by_a_push(source, remote, target, data):
    push(source, remote)
    for name in source.reference_names():
        remote.replace_reference(name, data)
        with pytest.raises(StoreError, match=f"{remote.url}: reference {name}.*push it again") as caught:
            pull(target, remote)
        assert caught.value.code == "damaged-reference"
        assert contents(target.root) == {}
        push(source, remote)
        assert there(remote) == contents(source.root)


@pytest.mark.parametrize("size", [-1, True, 1.5, "1", None, 10**30])
def test_a_reference_with_an_absurd_size_is_refused(source, remote, target, size):
    ref = source.put_bytes("bundle", b"named by nothing else")
    push(source, remote)
    remote.put_object(ref.digest, source.path(ref))
    data = seal({"kind": "bundle", "digest": ref.digest, "size": size})
    remote.replace_reference(f"artifacts/{'a' * 64}", data)
    assert code_of(pull, target, remote) == ("damaged" if size == 10**30 else "damaged-reference")
    assert target.reference_names() == []
    assert not target.has(ref.digest)


# Two machines


def test_the_first_record_of_a_step_stands_and_the_runs_name_moves(source, remote, tmp_path):
    push(source, remote)
    other = Store.open(tmp_path / "other", durability="none")
    corpus = other.put_bytes("text", b"different words")
    finish(other, "demo", "corpus", {"inputs": {}}, corpus)
    (key,) = other.steps()
    first = remote.read_reference(f"steps/{key}")
    done = push(other, remote)
    assert remote.read_reference(f"steps/{key}") == first == source.read_reference(f"steps/{key}")
    assert remote.read_reference("runs/demo/corpus") == other.read_reference("runs/demo/corpus")
    assert (done.objects, done.references, done.skipped) == (1, 1, 1)


def test_a_step_whose_objects_are_lost_there_gives_way(source, remote, tmp_path):
    push(source, remote)
    lost = source.resolve("demo/corpus/result").digest
    remote._bucket.remove(f"objects/sha256/{lost[:2]}/{lost}")
    other = Store.open(tmp_path / "other", durability="none")
    finish(other, "demo", "corpus", {"inputs": {}}, other.put_bytes("text", b"different words"))
    (key,) = other.steps()
    push(other, remote)
    assert remote.read_reference(f"steps/{key}") == other.read_reference(f"steps/{key}")


def moved(store: Store, data: bytes) -> Ref:
    ref = store.put_bytes("text", data)
    store.set_tag("best", ref, store.tag("best"))
    return ref


def test_a_tag_moves_on_in_both_directions_and_never_back(source, remote, target):
    push(source, remote)
    pull(target, remote)
    new = moved(target, b"better")
    push(source, remote)  # nothing new here
    push(target, remote)
    assert push(source, remote).references == 0  # older than what is there: not moved back
    pull(source, remote)
    assert source.resolve("best") == new
    assert pull(target, remote).references == 0


def test_a_tag_that_moved_apart_is_refused_and_both_are_named(source, remote, target):
    push(source, remote)
    pull(target, remote)
    ours, theirs = moved(source, b"ours"), moved(target, b"theirs")
    push(target, remote)
    standing = remote.read_reference("tags/best")
    for transfer in (push, pull):
        with pytest.raises(StoreError, match="best") as caught:
            transfer(source, remote)
        assert caught.value.code == "tag-diverged"
        assert ours.digest in str(caught.value)
        assert theirs.digest in str(caught.value)
    assert remote.read_reference("tags/best") == standing
    assert source.resolve("best") == ours


@pytest.mark.parametrize("transfer", ["push", "pull", "import"])
def test_a_tag_that_moved_apart_is_told_before_anything_is_changed(
    source, remote, target, tmp_path, transfer
):
    push(source, remote)
    pull(target, remote)
    for store in (source, target):
        new = moved(store, store.root.name.encode())
        finish(store, "demo", "pretrain", {"inputs": {}, "of": store.root.name}, new)
        store.set_tag("a-new-tag", new, None)
    export(source, tmp_path / "archive")
    push(source, remote, force=True)
    before = contents(target.root), there(remote)
    if transfer == "import":
        assert code_of(import_, target, tmp_path / "archive") == "tag-diverged"
        assert contents(target.root).keys() - before[0].keys() == {
            name for name in contents(source.root).keys() - before[0].keys() if name.startswith("objects/")
        }
        assert {name: contents(target.root)[name] for name in before[0]} == before[0]
    else:
        call = (pull, target, remote) if transfer == "pull" else (push, target, remote)
        assert code_of(*call) == "tag-diverged"
        assert (contents(target.root), there(remote)) == before


def test_the_pushing_store_decides_by_force_and_everybody_follows(source, remote, target, tmp_path):
    push(source, remote)
    pull(target, remote)
    follower = Store.open(tmp_path / "follower", durability="none")
    ours = moved(source, b"ours")
    moved(target, b"theirs")
    moved(target, b"theirs again")
    push(target, remote)
    pull(follower, remote)
    assert code_of(push, source, remote) == "tag-diverged"
    push(source, remote, force=True)
    for store in (target, follower):
        pull(store, remote)
        assert store.resolve("best") == ours
    newest = moved(source, b"and on")
    push(source, remote)
    pull(target, remote)
    assert target.resolve("best") == newest


def test_a_pulling_store_gives_way_by_force_and_both_go_on(source, remote, target):
    push(source, remote)
    pull(target, remote)
    moved(source, b"ours")
    moved(source, b"ours again")
    theirs = moved(target, b"theirs")
    push(target, remote)
    assert code_of(pull, source, remote) == "tag-diverged"
    pull(source, remote, force=True)
    assert source.tag("best") == target.tag("best")
    assert source.resolve("best") == theirs
    newest = moved(target, b"and on")
    push(target, remote)
    pull(source, remote)
    assert source.resolve("best") == newest


def test_force_does_not_move_a_tag_back_that_only_moved_on(source, remote, target):
    push(source, remote)
    pull(target, remote)
    new = moved(source, b"better")
    pull(source, remote, force=True)
    assert source.resolve("best") == new
    push(source, remote)
    push(target, remote, force=True)
    pull(target, remote)
    assert target.resolve("best") == new


def test_a_damaged_local_tag_is_mended_by_a_pull_with_force(source, remote):
    push(source, remote)
    before = source.tag("best")
    damage(source.root / "refs" / "tags" / "best")
    assert code_of(pull, source, remote) == "damaged-reference"
    pull(source, remote, force=True)
    assert source.tag("best") == before


def test_a_tag_moved_several_times_here_does_not_overwrite_a_move_there(source, remote, target):
    push(source, remote)
    pull(target, remote)
    moved(target, b"theirs")
    push(target, remote)
    for data in (b"ours", b"ours 2", b"ours 3"):
        moved(source, data)
    standing = remote.read_reference("tags/best")
    assert code_of(push, source, remote) == "tag-diverged"
    assert remote.read_reference("tags/best") == standing


def test_a_dry_pull_writes_nothing_and_says_what_the_pull_then_does(source, remote, target):
    push(source, remote)
    finish(target, "demo", "corpus", {"inputs": {}, "config": 1}, target.put_bytes("text", b"mine"))
    before = contents(target.root)
    planned = pull(target, remote, dry_run=True)
    assert contents(target.root) == before
    assert planned.replaced == ["demo/corpus"]
    assert set(planned.copied) == {*source.digests(), *source.reference_names()}
    done = pull(target, remote)
    assert (done, done.copied, done.replaced) == (planned, planned.copied, planned.replaced)
    again = pull(target, remote, dry_run=True)
    assert (again.objects, again.references, again.copied, again.replaced) == (0, 0, [], [])


def test_a_dry_push_writes_nothing_and_says_what_the_push_then_does(source, remote, target):
    push(source, remote)
    new = target.put_bytes("text", b"mine")
    finish(target, "demo", "corpus", {"inputs": {}, "config": 1}, new)
    target.set_tag("mine", new, None)
    before = there(remote)
    planned = push(target, RemoteStore.preview(remote.url), dry_run=True)
    assert there(remote) == before
    assert planned.replaced == ["demo/corpus"]
    assert set(planned.copied) == {*target.digests(), *target.reference_names()}
    done = push(target, remote)
    assert (done, done.copied, done.replaced) == (planned, planned.copied, planned.replaced)
    again = push(target, remote, dry_run=True)
    assert (again.objects, again.references, again.copied, again.replaced) == (0, 0, [], [])


def test_what_a_collector_takes_during_a_push_is_put_again(source, tmp_path, monkeypatch):
    remote = RemoteStore.open(f"file://{tmp_path}/remote", writable=True)
    shared, lock, taken = Store.open(tmp_path / "remote", durability="none"), remote.writers_lock, []

    def collected_before():
        taken.extend(collect(shared, keep_days=0).objects)
        return lock()

    monkeypatch.setattr(remote, "writers_lock", collected_before)
    push(source, remote)
    assert set(taken) == set(source.digests())
    assert there(remote) == contents(source.root)


def test_an_artifact_is_only_adopted_under_its_own_id(source, remote, target):
    other = small_bundle(7)
    ref = source.put_bundle(other)
    push(source, remote)
    wrong = f"artifacts/{small_bundle(8).artifact_id}"
    remote.replace_reference(wrong, remote.read_reference(f"artifacts/{other.artifact_id}") or b"")
    with pytest.raises(StoreError, match=f"{wrong} names object {ref.digest}, which is {other.artifact_id}"):
        pull(target, remote)
    assert wrong not in target.reference_names()


def test_a_tag_moved_by_somebody_else_in_between_is_looked_at_again(source, remote, target, monkeypatch):
    push(source, remote)
    pull(target, remote)
    moved(source, b"ours")
    theirs = moved(target, b"theirs")
    swap = remote.swap_reference

    def late(name, data, expected):
        monkeypatch.undo()
        push(target, remote)
        return swap(name, data, expected)

    monkeypatch.setattr(remote, "swap_reference", late)
    assert code_of(push, source, remote) == "tag-diverged"
    pull_into = Store.open(target.root.parent / "third", durability="none")
    pull(pull_into, remote)
    assert pull_into.resolve("best") == theirs


def test_references_are_written_after_their_objects(source, remote, target, monkeypatch):
    order: list[str] = []
    upload, adopt = remote.put_object, target.adopt_object
    for name in ("create_reference", "replace_reference", "swap_reference"):
        write = getattr(remote, name)

        def record(name, *rest, write=write):
            order.append(name.partition("/")[0])
            return write(name, *rest)

        monkeypatch.setattr(remote, name, record)
    monkeypatch.setattr(remote, "put_object", lambda *rest: (order.append("object"), upload(*rest)))
    push(source, remote)
    kinds = ["object", "artifacts", "steps", "runs", "tags"]
    assert order == sorted(order, key=kinds.index)
    assert set(order) == set(kinds)
    order.clear()
    give = target.adopt_reference
    monkeypatch.setattr(target, "adopt_object", lambda *rest: (order.append("object"), adopt(*rest)))
    monkeypatch.setattr(
        target,
        "adopt_reference",
        lambda name, data, **options: (order.append(name.partition("/")[0]), give(name, data, **options)),
    )
    pull(target, remote)
    assert order == sorted(order, key=kinds.index)
    assert set(order) == set(kinds)


def test_a_pushed_folder_is_a_store_to_work_in(source, tmp_path):
    push(source, RemoteStore.open(f"file://{tmp_path}/shared", writable=True))
    shared = Store.open(tmp_path / "shared", durability="none")
    assert shared.load_bundle(shared.resolve("best"))
    push(source, RemoteStore.open(f"file://{source.root}", writable=True))  # onto itself: all is there
