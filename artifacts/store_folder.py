"""Which folder a store lies in, and that it is one: the marker `STORE.json` and the folders beside it."""

import os
from pathlib import Path

from artifacts.canonical_json import canonical_json, parse_json
from artifacts.disk_errors import reading, writing
from artifacts.errors import ArtifactError, StoreError
from artifacts.files import make_folder, publish_new, staged

_MARKER = "STORE.json"
_CONTENT = {"format": "riftco-store", "version": 1, "hash": "sha256"}
_FOLDERS = ("objects/sha256", "refs/artifacts", "refs/steps", "refs/runs")
_OWN_ENTRIES = {_MARKER, "objects", "refs", "tmp", "quarantine"}


def locate(root: Path | str | None) -> Path:
    """The absolute path of a store: `root`, else $RIFTCO_STORE, else `store` in $RIFTCO_HOME or .riftco."""
    if root is None:
        root = os.environ.get("RIFTCO_STORE") or Path(os.environ.get("RIFTCO_HOME") or ".riftco", "store")
    if "://" in str(root):
        raise StoreError("not-local", f"cannot open the store {root}: only local folders are supported")
    return Path(root).expanduser().absolute()


def ensure(root: Path, *, sync: bool) -> None:
    """Make sure that a folder is a store: a new or empty one becomes one, an existing store is only read.

    Raises StoreError: "not-a-store" for a folder or file that is something else, "newer-store" for a version
    this program does not know.
    """
    marker = root / _MARKER
    with reading(root):
        if not marker.is_file():
            _create(root, sync=sync)
        data = marker.read_bytes()
    try:
        content = parse_json(data, what=str(marker))
    except ArtifactError as error:
        raise StoreError("not-a-store", f"{root} is not a store: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _CONTENT["format"]:
        raise StoreError("not-a-store", f"{root} is not a store: {marker} is of another format")
    if content != _CONTENT:
        raise StoreError("newer-store", f"{root} is a store of a later version: update riftco to use it")


def _create(root: Path, *, sync: bool) -> None:
    if root.exists() and not root.is_dir():
        raise StoreError("not-a-store", f"{root} is a file: give a folder for the store")
    strays = sorted(set(os.listdir(root)) - _OWN_ENTRIES) if root.exists() else []
    if strays:
        raise StoreError(
            "not-a-store",
            f"{root} is not a store and not empty (it holds {strays[0]!r}): give another folder",
        )
    with writing(root):
        if not root.is_dir():
            make_folder(root, sync=sync)
        for folder in _FOLDERS:  # on disk before the marker is, so that a marked store is a whole one
            make_folder(root / folder, sync=sync)
        with staged(root, canonical_json(_CONTENT), sync=sync) as temporary:
            try:
                publish_new(temporary, root / _MARKER, sync=sync)
            except FileExistsError:
                return  # another process was first
