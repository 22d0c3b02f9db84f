"""Files and directories of an export: complete, on disk, and never in the place of anything."""

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from artifacts.files import Chunks, make_folder, publish_new, rename_new, sync_folder, temporary_file


def publish_file(path: Path, data: Chunks) -> Path:
    """Write a new file; FileExistsError if the name is taken."""
    _require_free(path)
    make_folder(path.parent, sync=True)
    with temporary_file(path.parent, data, stem=path.name, sync=True) as temporary:
        publish_new(temporary, path, sync=True)
    return path


def publish_folder(path: Path, files: Mapping[str, Chunks]) -> Path:
    """Write a new folder of files; FileExistsError if the name is taken, by an empty folder too."""
    _require_free(path)
    make_folder(path.parent, sync=True)
    staging = path.parent / f".{path.name[:40]}.staging-{secrets.token_hex(8)}"
    staging.mkdir()
    try:
        for name, data in files.items():
            with temporary_file(staging, data, stem=name, sync=True) as temporary:
                os.replace(temporary, staging / name)
        sync_folder(staging)
        rename_new(staging, path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync_folder(path.parent)
    return path


def _require_free(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path}: exists and would be lost; give another name")
