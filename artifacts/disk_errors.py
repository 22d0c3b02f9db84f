"""What a disk can answer, in the store's terms: an OSError becomes a StoreError with a code and a remedy.

`kind` is what lies at `root`, for the message: the store, or a folder that the caller has chosen.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from artifacts.errors import StoreError

Kind = Literal["store", "folder"]

FULL = {errno.ENOSPC: "free some space", errno.EDQUOT: "free some of your quota"}
"""Remedies by errno."""
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_INSTEAD = {"store": "set RIFTCO_STORE to another folder", "folder": "make it so and run again"}


@contextmanager
def writing(root: Path, kind: Kind = "store") -> Iterator[None]:
    """Errors of writing below `root` become "disk-full", "not-writable", "no-hard-links" or "disk"."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            remedy = FULL[error.errno]
            raise StoreError("disk-full", f"the {kind} {root} is full: {remedy} and run again") from error
        if error.errno in _DENIED:
            message = f"the {kind} {root} is not writable ({error.strerror}): {_INSTEAD[kind]}"
            raise StoreError("not-writable", message) from error
        if error.errno == errno.EOPNOTSUPP:
            message = f"the store {root} is on a file system without hard links: set RIFTCO_STORE elsewhere"
            raise StoreError("no-hard-links", message) from error
        raise StoreError("disk", f"the {kind} {root} cannot be written: {error}") from error


@contextmanager
def reading(root: Path, kind: Kind = "store") -> Iterator[None]:
    """Errors of reading below `root` become "not-readable" or "disk"."""
    try:
        yield
    except OSError as error:
        code = "not-readable" if error.errno in _DENIED else "disk"
        raise StoreError(code, f"the {kind} {root} cannot be read: {error}") from error
