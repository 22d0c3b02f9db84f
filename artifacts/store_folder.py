"""Which folder a store lies in, and that it is one: the marker `STORE.json` and the folders beside it."""

import os
from pathlib import Path

from artifacts.disk_errors import reading, writing
from artifacts.errors import StoreError
from artifacts.files import make_folder, publish_new, staged
from artifacts.store_marker import MARKER, MARKER_NAME, OWN_ENTRIES, require_marker

FOLDERS = ("objects/sha256", "refs/artifacts", "refs/steps", "refs/runs", "refs/tags", "locks")


def locate(root: Path | str | None) -> Path:
    """The absolute path of a store: `root`, else $RIFTCO_STORE, else `store` in $RIFTCO_HOME or .riftco."""
    if root is None:
        root = os.environ.get("RIFTCO_STORE") or Path(os.environ.get("RIFTCO_HOME") or ".riftco", "store")
    root = str(root)
    if root.startswith("file:///"):
        root = root.removeprefix("file://")
    if root.startswith("file://"):
        raise StoreError("not-a-store", f"{root} names no folder: write file:///folder, with three slashes")
    if "://" in root:
        raise StoreError(
            "not-local", f"cannot work in the store {root}: open a local one and `riftco store push` to this"
        )
    try:
        return Path(root).expanduser().absolute()
    except RuntimeError as error:
        raise StoreError("not-a-store", f"{root} names no folder, {error}: write it out") from error


def require(root: Path) -> None:
    """Raise StoreError as `ensure` does, and "not-a-store" where there is none yet; creates nothing."""
    with reading(root):
        if (root / MARKER_NAME).is_file():
            require_marker((root / MARKER_NAME).read_bytes(), str(root))
            return
    remedy = "run something first, or set RIFTCO_STORE to the folder of a store"
    raise StoreError("not-a-store", f"there is no store at {root}, so no runs and no results: {remedy}")


def ensure(root: Path, *, sync: bool) -> None:
    """Make sure that a folder is a store: a new or empty one becomes one, an existing store is only read.

    Raises StoreError: "not-a-store" for a folder or file that is something else, "newer-store" for a version
    this program does not know.
    """
    marker = root / MARKER_NAME
    with reading(root):
        if not marker.is_file():
            _create(root, sync=sync)
        data = marker.read_bytes()
    require_marker(data, str(root))


def _create(root: Path, *, sync: bool) -> None:
    if root.exists() and not root.is_dir():
        raise StoreError("not-a-store", f"{root} is a file: give a folder for the store")
    strays = sorted(set(os.listdir(root)) - OWN_ENTRIES) if root.exists() else []
    if strays:
        raise StoreError(
            "not-a-store",
            f"{root} is not a store and not empty (it holds {strays[0]!r}): give another folder",
        )
    with writing(root):
        if not root.is_dir():
            make_folder(root, sync=sync)
        for folder in FOLDERS:  # on disk before the marker is, so that a marked store is a whole one
            make_folder(root / folder, sync=sync)
        with staged(root, MARKER, sync=sync) as temporary:
            try:
                publish_new(temporary, root / MARKER_NAME, sync=sync)
            except FileExistsError:
                return  # another process was first
