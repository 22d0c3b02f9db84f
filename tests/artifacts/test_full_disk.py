"""A disk that is full, read-only or gone: an error of the store, nothing partial, all well after it."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from artifacts import StepRecord, Store, StoreError, step_key, write_atomic
from artifacts.fsck import check_store
from artifacts.garbage import collect
from tests.artifacts.bundles import small_bundle

KEY = step_key("train", 1, {})
PAGE = 4096


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system of its own, of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting needs root and a system that permits it")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def work(store: Store) -> None:
    """What a step does with its results, of some 70 KB."""
    model = store.put_bundle(small_bundle())
    log = store.put_bytes("metrics", b"log" * 20_000)
    record = StepRecord("train", 1, {}, {"model": model, "log": log}, 1.5)
    store.name_run("demo", "train", KEY, store.remember(KEY, record))
    tag = store.tag("best")
    if tag is None or tag.ref != model:
        store.set_tag("best", model, tag)


def assert_sound(store: Store) -> None:
    assert check_store(store, full=True).problems == []
    assert not (store.root / "tmp").exists() or os.listdir(store.root / "tmp") == []


def fill(disk: Path, pages: int) -> Path:
    """Leave so many pages free."""
    filler = disk / "filler"
    free = os.statvfs(disk).f_bavail
    filler.write_bytes(bytes((free - pages) * PAGE))
    assert os.statvfs(disk).f_bavail == pages
    return filler


def test_a_disk_that_fills_up_at_any_moment_of_the_work_damages_nothing(disk):
    errors = []
    for pages in range(30):
        store = Store.open(disk / f"store-{pages}")
        filler = fill(disk, pages)
        try:
            work(store)
        except StoreError as error:
            errors.append(error)
        assert_sound(store)
        filler.unlink()
        work(store)
        assert_sound(store)
        shutil.rmtree(store.root)
    assert 15 <= len(errors) < 30
    assert {error.code for error in errors} == {"disk-full"}
    assert all(str(disk) in str(error) and "free some space" in str(error) for error in errors)


def test_a_new_store_on_a_full_disk_is_refused_and_can_be_made_later(disk):
    filler = fill(disk, 0)
    with pytest.raises(StoreError) as caught:
        Store.open(disk / "store")
    assert caught.value.code == "disk-full"
    filler.unlink()
    work(Store.open(disk / "store"))
    assert_sound(Store.open(disk / "store"))


def test_a_full_store_can_be_read_checked_and_collected(disk):
    store = Store.open(disk / "store")
    work(store)
    store.put_bytes("metrics", b"garbage")
    fill(disk, 0)
    assert store.load_bundle(store.resolve("demo/train")) == small_bundle()
    assert len(collect(store, dry_run=True).objects) == 1
    assert_sound(store)


def test_a_file_that_does_not_fit_leaves_the_old_one(disk):
    path = write_atomic(disk / "model.rift", b"old", sync=True)
    fill(disk, 3)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new" * 10_000, sync=True)
    assert path.read_bytes() == b"old"
    assert sorted(os.listdir(disk)) == ["filler", "model.rift"]


WRITES: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put_bytes("text", b"new"),
    "put a bundle": lambda store: store.put_bundle(small_bundle()),
    "remember": lambda store: store.remember(KEY, next(iter(store.steps().values()))),
    "name": lambda store: store.name_run("other", "train", KEY, next(iter(store.steps().values()))),
    "tag": lambda store: store.set_tag("new", store.resolve("demo/train"), None),
    "forget": lambda store: store.forget("demo"),
    "collect": collect,
    "another store": lambda store: Store.open(store.root.parent / "other"),
}


def test_a_read_only_store_is_read_and_refuses_all_that_writes(disk):
    store = Store.open(disk / "store")
    work(store)
    remount(disk, "ro")
    store = Store.open(disk / "store")
    for name, write in WRITES.items():
        with pytest.raises(StoreError) as caught:
            write(store)
        assert (name, caught.value.code) == (name, "not-writable")
    assert store.load_bundle(store.resolve("best")) == small_bundle()
    assert_sound(store)
    remount(disk, "rw")
    work(store)
    assert_sound(store)


def test_a_store_that_vanishes_is_an_error_and_does_not_come_back_by_itself(tmp_path):
    store = Store.open(tmp_path / "store")
    work(store)
    ref = store.resolve("best")
    record = store.recall(KEY)
    shutil.rmtree(store.root)
    jobs: dict[str, Callable[[Store], object]] = WRITES | {
        "remember": lambda store: store.remember(KEY, record),
        "name": lambda store: store.name_run("other", "train", KEY, record),
        "tag": lambda store: store.set_tag("new", ref, None),
        "read": lambda store: store.read_bytes(ref),
        "load": lambda store: store.load_bundle(ref),
        "resolve": lambda store: store.resolve("demo/train"),
    }
    for name in jobs.keys() - {"another store", "forget"}:
        with pytest.raises(StoreError, match=str(store.root)):
            jobs[name](store)
        assert not store.root.exists(), name
    assert (store.runs(), store.tags(), store.steps(), store.digests()) == ([], {}, {}, [])
    work(Store.open(store.root))
    assert_sound(store)


def test_a_store_that_vanishes_while_an_object_is_written_is_an_error_and_leaves_no_part_of_it(tmp_path):
    store = Store.open(tmp_path / "store")

    def chunks():
        yield b"first"
        shutil.rmtree(store.root)
        yield b"second"

    with pytest.raises(StoreError, match=str(store.root)) as caught:
        store.objects.put(chunks(), 11)
    assert caught.value.code == "disk"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    work(Store.open(store.root))
    assert_sound(store)


def test_a_store_behind_a_symbolic_link_is_the_store_it_leads_to(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = Store.open(tmp_path / "link")
    work(store)
    store.put_bytes("metrics", b"garbage")
    assert len(collect(store).objects) == 1
    assert_sound(store)
    real = Store.open(tmp_path / "real")
    assert real.load_bundle(real.resolve("demo/train")) == small_bundle()
    assert_sound(real)
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]
