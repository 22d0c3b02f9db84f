"""Resume points of a step at work: the newest intact first, damaged ones named, nothing left at the end."""

import errno
import fcntl
import hashlib
import os
import time
from contextlib import contextmanager

import pytest

from artifacts import Store, StoreError, step_key
from artifacts.fsck import check_store
from artifacts.garbage import collect
from artifacts.workspace import METRICS_DIGEST, Workspace
from tests.artifacts.checkpoints import small_checkpoint

KEY = step_key("train", 1, {})


@pytest.fixture
def store(tmp_path) -> Store:
    return Store.open(tmp_path / "store", durability="none")


def save(workspace: Workspace, step: int) -> None:
    metrics = b"metrics up to %d\n" % step
    metadata = {METRICS_DIGEST: hashlib.sha256(metrics).hexdigest()}
    workspace.save(small_checkpoint(global_step=step, metadata=metadata), metrics)


def steps(workspace: Workspace) -> tuple[list[int], dict[str, str]]:
    """The steps of the points that are intact, and the codes of the others by file."""
    refused: dict[str, str] = {}
    points = workspace.points(lambda path, error: refused.update({path.name: error.code}))
    return [point.checkpoint.global_step for point in points], refused


def test_the_newest_two_points_are_kept_and_come_newest_first(store):
    workspace = store.workspace(KEY)
    assert steps(workspace) == ([], {})
    for step in (5, 9, 10, 100):
        save(workspace, step)
    assert steps(workspace) == ([100, 10], {})
    assert len(os.listdir(workspace.folder)) == 4
    (newest, _) = workspace.points(lambda path, error: pytest.fail(str(error)))
    assert newest.metrics == b"metrics up to 100\n"


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated"),
        (lambda path: path.write_bytes(b""), "truncated"),
        (lambda path: path.with_suffix(".jsonl").write_bytes(b"other"), "metrics"),
        (lambda path: path.with_suffix(".jsonl").unlink(), "metrics"),
    ],
)
def test_a_damaged_point_is_named_and_passed_over(store, damage, code):
    workspace = store.workspace(KEY)
    save(workspace, 1)
    save(workspace, 2)
    newest = workspace.folder / "000000000002.riftckpt"
    newest.chmod(0o600)
    damage(newest)
    assert steps(workspace) == ([1], {newest.name: code})


def test_saving_drops_newer_points_for_this_run_has_passed_them_over(store):
    workspace = store.workspace(KEY)
    for step in (21, 24, 3, 6):
        save(workspace, step)
    assert steps(workspace) == ([6, 3], {})
    (workspace.folder / "000000000099.jsonl").write_bytes(b"its checkpoint was never written")
    save(workspace, 9)
    assert sorted(path.name[10:] for path in workspace.folder.iterdir()) == [
        "06.jsonl",
        "06.riftckpt",
        "09.jsonl",
        "09.riftckpt",
    ]


def test_saving_clears_away_what_a_killed_process_left(store):
    workspace = store.workspace(KEY)
    save(workspace, 1)
    (workspace.folder / ".000000000002.riftckpt.0123.tmp").write_bytes(b"half")
    save(workspace, 2)
    assert len(os.listdir(workspace.folder)) == 4


class Killed(BaseException):
    """What no handler of errors catches."""


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("backwards", [False, True])
def test_a_clearing_that_is_killed_leaves_no_checkpoint_without_its_metrics(
    store, monkeypatch, after, backwards
):
    workspace = store.workspace(KEY)
    for step in (1, 2):
        save(workspace, step)
    unlink, scandir, done = os.unlink, os.scandir, []

    def dying(*arguments, **options):
        if len(done) == after:
            raise Killed
        done.append(arguments)
        unlink(*arguments, **options)

    @contextmanager
    def in_order(folder):  # a file system lists names in any order
        with scandir(folder) as entries:
            yield iter(sorted(entries, key=lambda entry: entry.name, reverse=backwards))

    monkeypatch.setattr(os, "unlink", dying)
    monkeypatch.setattr(os, "scandir", in_order)
    with pytest.raises(Killed):
        workspace.clear()
    monkeypatch.undo()
    assert steps(workspace) == ([[2, 1], [2], [], []][after], {})


def test_a_cleared_workspace_leaves_nothing_and_clearing_again_is_harmless(store):
    workspace = store.workspace(KEY)
    save(workspace, 1)
    workspace.clear()
    workspace.clear()
    assert not workspace.folder.exists()
    assert check_store(store, full=True).problems == []


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (errno.ENOSPC, "disk-full", "is full: free some space and run again"),
        (errno.EACCES, "not-writable", "is not writable (Permission denied): make it so and run again"),
        (errno.EIO, "disk", "cannot be written: [Errno 5] Input/output error"),
    ],
)
def test_a_disk_that_refuses_is_told_by_the_folder_for_there_may_be_no_store(
    tmp_path, monkeypatch, number, code, says
):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    workspace = Workspace(tmp_path, sync=False)
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StoreError) as caught:
        save(workspace, 1)
    assert (caught.value.code, str(caught.value)) == (code, f"the folder {tmp_path} {says}")


def test_points_are_the_same_in_a_store_that_was_opened_again(store):
    save(store.workspace(KEY), 3)
    assert steps(Store.open(store.root).workspace(KEY)) == ([3], {})
    assert steps(store.workspace(step_key("train", 2, {}))) == ([], {})


def test_the_collector_drops_workspaces_that_nothing_has_touched_for_days(store):
    workspace, fresh = store.workspace(KEY), store.workspace(step_key("train", 2, {}))
    lock = store.root / "locks" / f"{KEY}.lock"
    save(workspace, 1)
    save(fresh, 1)
    days_ago = time.time() - 8 * 86_400
    os.utime(workspace.folder, (days_ago, days_ago))
    assert collect(store, keep_days=9).abandoned == []
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert collect(store).abandoned == []  # somebody is at work there
    assert lock.exists()  # whoever it was, was killed
    assert collect(store, dry_run=True).abandoned == [workspace.folder]
    assert workspace.folder.exists()
    assert collect(store).abandoned == [workspace.folder]
    assert not workspace.folder.exists()
    assert not lock.exists()
    assert collect(store, keep_days=0).abandoned == []  # what changed within a day may be at work
    assert steps(fresh) == ([1], {})
