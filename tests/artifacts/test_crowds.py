"""Many processes at once: writers of the same and of other content, racing tags, readers and a collector."""

import os
import random
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from artifacts import StepRecord, Store, StoreError, step_key
from artifacts.fsck import check_store
from artifacts.garbage import collect
from tests.artifacts.children import Say, together

TIMES = pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.soak)], ids=["quick", "full"])


def assert_sound(root: Path) -> None:
    assert check_store(Store.open(root), full=True).problems == []
    assert os.listdir(root / "tmp") == []


def put(root: Path, data: bytes, say: Say) -> None:
    ref = Store.open(root).put_bytes("data", data)
    path = Store.open(root).path(ref)
    say([ref.digest, path.stat().st_ino])


@TIMES
def test_a_crowd_that_writes_one_object_makes_one_file(tmp_path, times):
    for turn in range(times):
        root = tmp_path / f"store-{turn}"
        said = together([partial(put, root, b"the same bytes" * 1000)] * 64)
        assert len({tuple(what) for (what,) in said}) == 1  # one digest, one file, ever
        (digest,) = Store.open(root).digests()
        assert Store.open(root).objects.path(digest).stat().st_nlink == 1
        assert_sound(root)


@TIMES
def test_a_crowd_that_writes_different_objects_makes_them_all(tmp_path, times):
    for turn in range(times):
        root = tmp_path / f"store-{turn}"
        said = together([partial(put, root, b"bytes of %d" % number * 1000) for number in range(64)])
        assert Store.open(root).digests() == sorted(what[0] for (what,) in said)
        assert len({what[1] for (what,) in said}) == 64
        assert_sound(root)


@TIMES
@pytest.mark.parametrize("new", [True, False], ids=["a new tag", "a tag"])
def test_of_a_crowd_that_moves_a_tag_one_wins_and_all_others_know(tmp_path, times, new):
    for turn in range(times):
        store = Store.open(tmp_path / f"store-{turn}")
        before = None if new else store.set_tag("best", store.put_bytes("data", b"before"), None)

        def move(number: int, say: Say, store: Store = store, before: object = before) -> None:
            ref = store.put_bytes("data", b"%d" % number)
            try:
                say([store.set_tag("best", ref, before).sequence, ref.digest])
            except StoreError as error:
                say([error.code, ref.digest])

        said = [what for (what,) in together([partial(move, number) for number in range(16)])]
        (winner,) = [what for what in said if what[0] != "tag-moved"]
        assert winner == [1 if new else 2, store.tag("best").ref.digest]
        assert [what[0] for what in said].count("tag-moved") == 15
        assert_sound(store.root)


def test_an_object_that_is_collected_while_it_is_read_is_read_from_quarantine(tmp_path):
    store = Store.open(tmp_path / "store")
    ref = store.put_bytes("data", b"late")
    tries = []

    def slow(path: Path) -> bytes:
        tries.append(path)
        collect(store)
        return path.read_bytes()

    assert store.objects.use(ref.digest, slow) == b"late"
    assert len(set(tries)) == 2
    assert store.read_bytes(ref) == b"late"


def test_an_object_that_came_back_from_quarantine_can_be_collected_again(tmp_path):
    store = Store.open(tmp_path / "store")
    ref = store.put_bytes("data", b"again")
    for _ in range(2):
        assert collect(store).objects == [ref.digest]
        assert not store.has(ref.digest)
        tag = store.set_tag("best", ref, store.tag("best"))
        assert collect(store).objects == []
        assert store.has(ref.digest)
        store.set_tag("best", None, tag)
    assert collect(store).objects == [ref.digest]
    assert_sound(store.root)


def write(root: Path, name: str, end: float, say: Say) -> None:
    """Make steps from one another's results, name, tag and forget them; contents come again and again."""
    store, chance, made, last = Store.open(root, durability="none"), random.Random(name), 0, None
    while time.monotonic() < end:
        result = store.put_bytes("data", b"content %d" % chance.randrange(60))
        recipe = {"base": {"kind": last.kind, "digest": last.digest}} if last else {}
        recipe |= {"made": result.digest}
        key = step_key("train", 1, recipe)
        record = store.remember(key, StepRecord("train", 1, recipe, {"data": result}, 1.5))
        run = f"{name}-{chance.randrange(4)}"
        store.name_run(run, "train", key, record)
        assert store.read_bytes(store.resolve(f"{run}/train")) == store.read_bytes(result)
        if chance.random() < 0.3:
            store.forget(f"{name}-{chance.randrange(4)}")
        if chance.random() < 0.3:
            try:
                store.set_tag("best", result, store.tag("best"))
            except StoreError as error:
                require(error, "tag-moved")
        last, made = result if chance.random() < 0.5 else None, made + 1
    say(made)


def require(error: StoreError, code: str) -> None:
    if error.code != code:
        raise error


def read(root: Path, end: float, say: Say) -> None:
    """Read whatever has a name; what a name meant can be read, even if it means something else by now."""
    store, count = Store.open(root), 0
    while time.monotonic() < end:
        names = [f"{run}/train" for run in store.runs()] + list(store.tags())
        for name in names:
            try:
                ref = store.resolve(name)
            except StoreError as error:
                require(error, "unknown")  # forgotten meanwhile
                continue
            assert store.read_bytes(ref).startswith(b"content")
            count += 1
    say(count)


def collect_again_and_again(root: Path, end: float, say: Say) -> None:
    store, count, objects = Store.open(root, durability="none"), 0, 0
    while time.monotonic() < end:
        for name in store.reference_names():
            with suppress(FileNotFoundError):  # forgotten meanwhile
                os.utime(root / "refs" / name, (0, 0))  # young ones would be spared
        objects += len(collect(store, unnamed=count % 2 == 0).objects)
        count += 1
        time.sleep(0.01)
    say([count, objects])


@pytest.mark.parametrize("seconds", [10, pytest.param(60, marks=pytest.mark.soak)], ids=["quick", "full"])
def test_writers_readers_and_a_collector_do_not_disturb_each_other(tmp_path, seconds):
    root = tmp_path / "store"
    Store.open(root)
    end = time.monotonic() + seconds
    writers = [partial(write, root, name, end) for name in ("a", "b", "c")]
    readers = [partial(read, root, end)] * 2
    said = together([*writers, *readers, partial(collect_again_and_again, root, end)])
    assert "error" not in str(said), said
    *counts, (collected,) = [what for what in said if what]
    assert min(count for (count,) in counts) >= 10  # nobody waited for ever
    assert min(collected) >= 10
    assert_sound(root)
    print(f"written and read {counts}, collections and objects collected {collected}")
