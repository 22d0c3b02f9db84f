"""Atomic writing: the old file or the new one, whatever goes wrong."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from artifacts import files, write_atomic
from artifacts.files import make_folder, publish_new, staged, temporary_file


def chunks_then_failure() -> Iterator[bytes]:
    yield b"half"
    raise RuntimeError("the source broke")


def test_chunks_are_written_one_after_the_other(tmp_path):
    chunks: list[bytes | memoryview] = [b"one", memoryview(b"two"), b""]
    path = write_atomic(tmp_path / "a" / "b" / "file", iter(chunks))
    assert path.read_bytes() == b"onetwo"
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_is_replaced_whole(tmp_path, sync):
    path = tmp_path / "file"
    write_atomic(path, b"long old content", sync=sync)
    with path.open("rb") as reader:
        write_atomic(str(path), b"new", sync=sync)
        assert reader.read() == b"long old content"
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_a_file_has_the_mode_that_the_umask_leaves_and_a_staged_one_its_own(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        assert write_atomic(tmp_path / "a", b"").stat().st_mode & 0o777 == mode
        with staged(tmp_path, b"", sync=False) as path:
            assert path.stat().st_mode & 0o777 == 0o444
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "/dev/null"])
def test_what_an_open_file_already_holds_is_not_replaced(tmp_path, name):
    """A shell's `>>` has opened the file that /dev/stdout leads to."""
    link = tmp_path / "link"
    link.symlink_to(name)
    for given in (name, str(link)):
        code = f"from artifacts import write_atomic; write_atomic({given!r}, b'new')"
        refuses_an_open_file(tmp_path, code, given)


def refuses_an_open_file(tmp_path, code, name):
    with (tmp_path / "out").open("wb") as output:
        output.write(b"old")
        output.flush()
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=output, stderr=subprocess.PIPE, check=False
        )
    assert b"FileExistsError: cannot write the file " + name.encode() in done.stderr
    assert (tmp_path / "out").read_bytes() == b"old"


def test_a_failing_source_leaves_the_old_file_and_nothing_else(tmp_path):
    path = write_atomic(tmp_path / "file", b"old")
    with pytest.raises(RuntimeError, match="source broke"):
        write_atomic(path, chunks_then_failure())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failing_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    path = write_atomic(tmp_path / "file", b"old")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as broken:
        broken.setattr(os, call, full)
        with pytest.raises(OSError, match="no space left"):
            write_atomic(path, b"new", sync=True)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_short_writes_of_the_system_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    assert write_atomic(tmp_path / "file", b"0123456789").read_bytes() == b"0123456789"


def test_a_folder_is_not_replaced(tmp_path):
    with pytest.raises(IsADirectoryError, match="folder"):
        write_atomic(tmp_path, b"")


def test_a_name_as_long_as_the_file_system_allows_is_fine(tmp_path):
    assert write_atomic(tmp_path / ("é" * 127), b"x").read_bytes() == b"x"


def test_reserved_space_that_is_not_needed_is_given_back(tmp_path):
    with temporary_file(tmp_path, b"abc", stem="t", sync=False, mode=0o600, size=5000) as path:
        assert path.read_bytes() == b"abc"
    assert os.listdir(tmp_path) == []


def test_a_disk_that_cannot_reserve_space_is_used_without(tmp_path, monkeypatch):
    def unsupported(*arguments):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with temporary_file(tmp_path, b"abc", stem="t", sync=False, mode=0o600, size=3) as path:
        assert path.read_bytes() == b"abc"


def test_publishing_takes_a_free_name_once(tmp_path):
    target = tmp_path / "deep" / "er" / "name"
    with temporary_file(tmp_path, b"first", stem="t", sync=False, mode=0o444) as path:
        publish_new(path, target, sync=True)
    with (
        temporary_file(tmp_path, b"second", stem="t", sync=False, mode=0o444) as path,
        pytest.raises(FileExistsError),
    ):
        publish_new(path, target, sync=True)
    assert target.read_bytes() == b"first"
    assert target.stat().st_nlink == 1


def refuse(code: int):
    def call(*arguments):
        raise OSError(code, "refused")

    return call


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV])
def test_without_hard_links_a_rename_that_replaces_nothing_publishes(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "link", refuse(code))
    target = tmp_path / "name"
    with temporary_file(tmp_path, b"first", stem="t", sync=True, mode=0o444) as path:
        publish_new(path, target, sync=True)
    with (
        temporary_file(tmp_path, b"second", stem="t", sync=True, mode=0o444) as path,
        pytest.raises(FileExistsError),
    ):
        publish_new(path, target, sync=True)
    assert target.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["name"]


def test_a_file_system_that_can_do_neither_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    monkeypatch.setattr(files, "rename_new", refuse(errno.EOPNOTSUPP))
    with (
        temporary_file(tmp_path, b"", stem="t", sync=False, mode=0o444) as path,
        pytest.raises(OSError, match="refused") as caught,
    ):
        publish_new(path, tmp_path / "name", sync=False)
    assert caught.value.errno == errno.EOPNOTSUPP


def test_folders_are_renamed_to_free_names_only(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with pytest.raises(FileExistsError):
        files.rename_new(tmp_path / "a", tmp_path / "b")
    files.rename_new(tmp_path / "a", tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]


def test_folders_are_made_where_the_path_is_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert write_atomic("file", b"x", sync=True).read_bytes() == b"x"
    make_folder(tmp_path / "a" / "b", sync=True)
    assert (tmp_path / "a" / "b").is_dir()


def test_a_symbolic_link_to_a_file_is_written_through(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    assert write_atomic(tmp_path / "link", b"new") == tmp_path / "link"
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(FileExistsError, match="pipe"):
            write_atomic(tmp_path / name, b"x")
    assert (tmp_path / "pipe").is_fifo()
