"""References: created once, or replaced in one step."""

import errno
import os
from pathlib import Path

import pytest

from artifacts import StoreError
from artifacts.records import REFERENCE_FOLDERS
from artifacts.reference_folder import ReferenceFolder


@pytest.fixture
def references(tmp_path) -> ReferenceFolder:
    for folder in REFERENCE_FOLDERS:
        (tmp_path / "refs" / folder).mkdir(parents=True)
    return ReferenceFolder(tmp_path, sync=False)


def test_a_folder_that_an_archive_had_nothing_for_is_made(references, tmp_path):
    (tmp_path / "refs" / "runs").rmdir()
    references.touch("runs/demo/train")  # forgotten meanwhile: no error
    with pytest.raises(StoreError, match=r"refs/runs is no folder.*bring it back, or make it"):
        references.require_folders()
    references.replace("runs/demo/train", b"")
    references.require_folders()


def test_a_reference_is_created_once(references):
    assert references.read("steps/a") is None
    assert references.create("steps/a", b"first")
    assert not references.create("steps/a", b"second")
    assert references.read("steps/a") == b"first"


def test_a_reference_can_be_replaced_whether_it_exists_or_not(references, tmp_path):
    for data in (b"first", b"second"):
        references.replace("runs/demo/train", data)
        assert references.read("runs/demo/train") == data
    assert os.listdir(tmp_path / "tmp") == []


def test_names_are_sorted_and_exclude_what_other_programs_hide(references, tmp_path):
    for name in ("b", "a"):
        references.create(f"runs/{name}/stage", b"")
    (tmp_path / "refs" / "runs" / ".DS_Store").write_text("")
    assert references.names("runs") == ["a", "b"]
    assert references.names("absent") == []
    assert references.names("runs/a/stage") == []


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("nowhere")])
def test_a_file_or_a_dead_link_in_the_place_of_a_folder_is_an_error(references, tmp_path, make):
    (tmp_path / "refs" / "runs").rmdir()
    make(tmp_path / "refs" / "runs")
    with pytest.raises(StoreError, match="refs/runs"):
        references.spoken_names()


@pytest.mark.parametrize("write", [ReferenceFolder.create, ReferenceFolder.replace])
def test_a_full_disk_leaves_the_old_reference(references, monkeypatch, write):
    references.create("runs/demo/train", b"old")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full)
        with pytest.raises(StoreError, match="full"):
            write(references, "runs/demo/train", b"new")
    assert references.read("runs/demo/train") == b"old"


def test_an_unreadable_reference_is_a_store_error(references, monkeypatch):
    references.create("steps/a", b"x")

    def broken(path):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(StoreError, match="cannot be read"):
        references.read("steps/a")


def test_a_folder_in_the_place_of_a_reference_has_no_bytes(references, tmp_path):
    (tmp_path / "refs" / "steps" / "a").mkdir(parents=True)
    assert references.read("steps/a") == b""
