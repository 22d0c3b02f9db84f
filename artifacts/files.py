"""Writing files so that a crash leaves the old file, the new file or none, and never a part of one.

Every file is written under a temporary name in a folder on the same device and appears under its own name in
one step: `write_atomic` replaces what was there, `publish_new` fails if something is. With `sync` the bytes
reach the disk before the name does, and the name before the call returns; without it a crash of the process
is survived, a power loss is not. A killed process leaves at most a temporary file.
"""

import ctypes
import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Chunks = bytes | Iterable[bytes | memoryview]

_CANNOT_RESERVE = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
CANNOT_LINK = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
_MOST_LINKS = 40  # as Linux follows
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def write_atomic(path: Path | str, data: Chunks, *, sync: bool = False) -> Path:
    """Write or replace the file `path`, or the one that it is a symbolic link to; creates its folder.

    Its mode is what the umask leaves of 0666. Returns the path given. Raises IsADirectoryError if `path` is a
    folder, FileExistsError if it is a device, a pipe or the like, or another name of an open file, as
    /dev/stdout is, and OSError; the temporary file is removed on failure.
    """
    given, path = Path(path), Path(path)
    for _ in range(_MOST_LINKS):
        if _names_open_file(path):
            raise FileExistsError(
                f"cannot write the file {given}: it is another name of an open file or device"
            )
        if not path.is_symlink():
            break
        path = path.parent / os.readlink(path)
    if path.is_dir():
        raise IsADirectoryError(f"cannot write the file {path}: a folder has this name")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"cannot write the file {path}: something that is no file has this name")
    make_folder(path.parent, sync=sync)
    with temporary_file(path.parent, data, stem=path.name, sync=sync) as temporary:
        os.replace(temporary, path)
        if sync:
            sync_folder(path.parent)
    return given


def _names_open_file(path: Path) -> bool:
    """Whether it is one of /dev/stdout, /dev/fd/1 and the like, whose file replacing would cut off."""
    folder = Path(os.path.realpath(path.parent))
    return folder == Path("/dev") or folder.is_relative_to("/proc")


@contextmanager
def temporary_file(
    folder: Path, data: Chunks, *, stem: str, sync: bool, mode: int | None = None, size: int = 0
) -> Iterator[Path]:
    """Yield a new, complete, closed file in `folder`; on leaving, its temporary name is gone.

    Without `mode` it has what the umask leaves of 0666. `size` bytes are reserved first, so that a full disk
    shows before the work is done.
    """
    path = folder / f".{stem[:40]}.{secrets.token_hex(8)}.tmp"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            _fill(descriptor, data, size)
            if mode is not None:
                os.fchmod(descriptor, mode)
            if sync:
                os.fsync(descriptor)  # an error is final: a second fsync could claim success for lost pages
        finally:
            os.close(descriptor)
        yield path
    finally:
        with suppress(FileNotFoundError):  # replaced into place
            path.unlink()


@contextmanager
def staged(root: Path, data: Chunks, *, sync: bool, size: int = 0) -> Iterator[Path]:
    """`temporary_file` in the `tmp` folder of a store, read-only, to be published within the same store."""
    folder = root / "tmp"
    folder.mkdir(exist_ok=True)  # not its parents: a store that has vanished does not come back by itself
    with temporary_file(folder, data, stem="staged", sync=sync, mode=0o444, size=size) as temporary:
        yield temporary


def _fill(descriptor: int, data: Chunks, size: int) -> None:
    if size:
        _reserve(descriptor, size)
    written = 0
    for chunk in [data] if isinstance(data, bytes) else data:
        view = memoryview(chunk).cast("B")
        while view:
            count = os.write(descriptor, view)
            written += count
            view = view[count:]
    if written < size:
        os.ftruncate(descriptor, written)


def _reserve(descriptor: int, size: int) -> None:
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise


def publish_new(temporary: Path, path: Path, *, sync: bool) -> None:
    """Give a complete temporary file its name, creating the folder of `path`; both must be on one device.

    Raises FileExistsError if the name is taken, even in the same moment; then too the name is on disk.
    Raises OSError(EOPNOTSUPP) where the file system has neither hard links nor a rename that never replaces.
    """
    make_folder(path.parent, sync=sync)
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise
        rename_new(temporary, path)
    finally:
        if sync:
            sync_folder(path.parent)


def rename_new(source: Path, target: Path) -> None:
    """Rename a file or folder unless the target exists: Linux's `renameat2` with RENAME_NOREPLACE.

    Raises FileExistsError if it exists, OSError(EOPNOTSUPP) where the system or file system cannot do this.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.EOPNOTSUPP, "cannot publish files in one step here", str(target))
    if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        number = errno.EOPNOTSUPP if number in (errno.EINVAL, errno.ENOSYS) else number
        raise OSError(number, os.strerror(number), str(target))


def make_folder(folder: Path, *, sync: bool) -> None:
    """Create a folder and its missing parents, each on disk in its parent before anything is made in it.

    A folder that exists is synced too: whoever made it may have been killed before.
    """
    if not folder.is_dir():
        make_folder(folder.parent, sync=sync)
        folder.mkdir(exist_ok=True)
    if sync:
        with suppress(PermissionError):  # a parent we may not look into: the folder is not of our making
            sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
