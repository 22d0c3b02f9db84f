"""Several processes, kills, full and read-only disks, and the order in which the disk is told."""

import os
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from artifacts import ModelBundle, StepRecord, Store, step_key
from artifacts.fsck import check_store
from artifacts.store import Durability
from tests.artifacts.bundles import small_bundle

ROOT = Path(__file__).parents[2]
KEY = step_key("train", 1, {})
CALLS = ("open", "write", "posix_fallocate", "fchmod", "link", "replace", "mkdir", "unlink")


def work(root: Path, bundle: ModelBundle, durability: Durability = "none") -> StepRecord:
    """What a step does with its result. A kill needs no durability: what a process wrote, others see."""
    store = Store.open(root, durability=durability)
    record = StepRecord("train", 1, {}, {"model": store.put_bundle(bundle)}, 0.0)
    record = store.remember(KEY, record)
    store.name_run("demo", "train", KEY, record)
    return record


def assert_sound(root: Path) -> None:
    """Every object hashes to its name and every reference names an intact object."""
    if not (root / "STORE.json").exists():
        return
    assert check_store(Store.open(root), full=True).problems == []


def fork(job: Callable[[], object]) -> int:
    """Run the job in a child process and return the child's id; the child exits with 0 if the job returns."""
    child = os.fork()
    if child:
        return child
    try:
        job()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def kill_at(count: int) -> None:
    """Let this process be killed, as by `kill -9`, just before its `count`-th call that changes the disk."""
    left = [count]

    def counted(call):
        def wrapper(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return wrapper

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def work_until_killed(root: Path, bundle: ModelBundle, count: int) -> None:
    kill_at(count)
    work(root, bundle)


def test_a_kill_at_any_moment_leaves_a_sound_store_that_the_next_run_completes(tmp_path):
    bundle = small_bundle()
    expected = work(tmp_path / "expected", bundle)
    kills = 0
    while True:
        root = tmp_path / f"killed-{kills}"
        child = fork(partial(work_until_killed, root, bundle, kills + 1))
        status = os.waitpid(child, 0)[1]
        assert_sound(root)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        kills += 1
        assert work(root, bundle) == expected
        assert_sound(root)
        assert Store.open(root).load_bundle(Store.open(root).resolve("demo/train")) == bundle
    assert kills > 30


def test_a_kill_while_bytes_are_written_leaves_no_object(tmp_path):
    reader, writer = os.pipe()

    def job():
        def chunks():
            yield b"x" * 1000
            os.write(writer, b"!")
            signal.pause()
            yield b""

        Store.open(tmp_path).objects.put(chunks(), 1000)

    child = fork(job)
    os.read(reader, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    store = Store.open(tmp_path)
    assert store.digests() == []
    assert store.read_bytes(store.put_bytes("data", b"x" * 1000)) == b"x" * 1000


def test_writers_of_the_same_content_all_succeed_and_share_one_file(tmp_path):
    bundles = [small_bundle(seed) for seed in range(12)]
    gate, opener = os.pipe()

    def job():
        os.close(opener)
        os.read(gate, 1)  # returns when the parent closes its end: all start at once
        for bundle in bundles:
            work(tmp_path / "store", bundle)

    children = [fork(job) for _ in range(4)]
    os.close(gate)
    os.close(opener)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert_sound(tmp_path / "store")
    store = Store.open(tmp_path / "store")
    assert sorted(store.artifacts()) == sorted(bundle.artifact_id for bundle in bundles)
    assert [store.path(ref).stat().st_nlink for ref in store.artifacts().values()] == [1] * 12
    assert os.listdir(tmp_path / "store" / "tmp") == []
    assert not (tmp_path / "store" / "quarantine").exists()


def traced(monkeypatch, job: Callable[[], object]) -> list[tuple[str, str]]:
    """The job's fsyncs and new names, in order: ("sync", path) and ("name", path)."""
    events: list[tuple[str, str]] = []
    paths: dict[int, str] = {}
    original = {name: getattr(os, name) for name in ("open", "fsync", "link", "replace")}

    def open_(path, *arguments, **options):
        descriptor = original["open"](path, *arguments, **options)
        paths[descriptor] = str(path)
        return descriptor

    def fsync(descriptor):
        events.append(("sync", paths[descriptor]))
        original["fsync"](descriptor)

    def naming(call):
        def wrapper(source, target):
            events.append(("sync-source" if ("sync", str(source)) in events else "unsynced", str(target)))
            call(source, target)
            events.append(("name", str(target)))

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_)
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "link", naming(original["link"]))
        patch.setattr(os, "replace", naming(original["replace"]))
        job()
    return events


def test_an_object_and_its_folder_are_on_disk_before_any_reference_names_it(tmp_path, monkeypatch):
    events = traced(monkeypatch, lambda: work(tmp_path, small_bundle(), "full"))
    names = [path for event, path in events if event == "name"]
    folders = [Path(path).relative_to(tmp_path).parts[0] for path in names]
    assert folders == ["STORE.json", "objects", "refs", "refs", "refs"]
    assert "unsynced" not in {event for event, _ in events}
    for name, following in zip(names, [*names[1:], None], strict=True):
        start = events.index(("name", name))
        end = events.index(("name", following)) if following else len(events)
        assert ("sync", str(Path(name).parent)) in events[start:end]
    shard = Path(names[1]).parent
    assert ("sync", str(shard.parent)) in events[: events.index(("name", names[1]))]


def test_a_name_that_somebody_else_just_made_is_synced_too(tmp_path, monkeypatch):
    work(tmp_path, small_bundle(), "full")
    events = traced(monkeypatch, lambda: Store.open(tmp_path).put_bundle(small_bundle()))
    digest = Store.open(tmp_path).digests()[0]
    assert ("sync", str(tmp_path / "objects" / "sha256" / digest[:2])) in events


def test_without_durability_nothing_waits_for_the_disk(tmp_path, monkeypatch):
    store = Store.open(tmp_path, durability="none")
    assert [event for event, _ in traced(monkeypatch, lambda: store.put_bytes("text", b"x"))] == [
        "unsynced",
        "name",
    ]


def on_own_disk(script: str, tmp_path: Path) -> str:
    """What a script prints that runs in a mount namespace of its own, where `disk` is a tmpfs of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    header = f"import errno, os, subprocess, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    header += f"disk = {str(disk)!r}\nif subprocess.call({mount!r}): sys.exit(77)\n"
    command = ["unshare", "--mount", "--map-root-user", sys.executable, "-c"]
    try:
        done = subprocess.run(
            [*command, header + textwrap.dedent(script)], capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("this system has no mount namespaces")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("mounting is not permitted here")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_disk_is_an_error_that_leaves_nothing_half_written(tmp_path):
    output = on_own_disk(
        """
        from artifacts import Store, StoreError
        store = Store.open(disk)
        kept = [store.put_bytes("data", bytes([n]) * 60_000) for n in range(3)]
        try:
            store.put_bytes("data", b"x" * 200_000)
        except StoreError as error:
            print(error.code)
        print(len(store.digests()), os.listdir(disk + "/tmp"))
        print([store.check(ref) for ref in kept])
        print(store.read_bytes(store.put_bytes("data", b"small")))
        """,
        tmp_path,
    )
    assert output.splitlines() == ["disk-full", "3 []", "[None, None, None]", "b'small'"]


def test_a_read_only_store_is_read_and_refuses_to_be_written(tmp_path):
    output = on_own_disk(
        """
        from artifacts import StepRecord, Store, StoreError, step_key
        store = Store.open(disk)
        ref = store.put_bytes("text", b"kept")
        record = StepRecord("train", 1, {}, {"text": ref}, 0.0)
        store.name_run("demo", "train", "0" * 64, record)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        store = Store.open(disk)
        print(store.read_bytes(store.resolve("demo/train")))
        for write in (
            lambda: store.put_bytes("text", b"new"),
            lambda: store.remember(step_key("train", 1, {}), record),
            lambda: store.name_run("demo", "other", "0" * 64, record),
            lambda: Store.open(disk + "/new"),
        ):
            try:
                write()
            except StoreError as error:
                print(error.code)
        """,
        tmp_path,
    )
    assert output.splitlines() == ["b'kept'", *["not-writable"] * 4]
