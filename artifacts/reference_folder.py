"""The small files under `refs/` that give objects their ids, keys and names.

A reference appears complete or not at all. `create` is for what follows from content and so never changes
(`artifacts/<artifact id>`, `steps/<step key>`); `replace` is for names that move (`runs/<run>/<stage>`,
`tags/<name>`).
"""

import os
from contextlib import suppress
from pathlib import Path

from artifacts.disk_errors import reading, writing
from artifacts.errors import StoreError
from artifacts.files import make_folder, publish_new, staged, sync_folder
from artifacts.records import REFERENCE_FOLDERS


class ReferenceFolder:
    """The references of a store by path below `refs`; safe for any number of processes and threads."""

    def __init__(self, root: Path, *, sync: bool) -> None:
        """`root` is the store's folder; with `sync`, references survive a power loss once written."""
        self._root = root
        self._sync = sync

    def read(self, name: str) -> bytes | None:
        """The bytes of a reference, or None; of a folder in its place none. Raises StoreError."""
        with reading(self._root):
            try:
                return self._path(name).read_bytes()
            except IsADirectoryError:
                return b""
            except (FileNotFoundError, NotADirectoryError):
                return None

    def create(self, name: str, data: bytes) -> bool:
        """Write a reference unless it exists; whether it was written. Raises StoreError."""
        with writing(self._root), staged(self._root, data, sync=self._sync) as temporary:
            try:
                publish_new(temporary, self._path(name), sync=self._sync)
            except FileExistsError:
                return False
        return True

    def replace(self, name: str, data: bytes) -> None:
        """Write or replace a reference in one step. Raises StoreError."""
        path = self._path(name)
        with writing(self._root), staged(self._root, data, sync=self._sync) as temporary:
            make_folder(path.parent, sync=self._sync)
            os.replace(temporary, path)
            if self._sync:
                sync_folder(path.parent)

    def remove(self, name: str) -> None:
        """Remove a reference, unless somebody else just has. Raises StoreError."""
        path = self._path(name)
        with writing(self._root):
            path.unlink(missing_ok=True)
            if self._sync:
                sync_folder(path.parent)

    def written(self, name: str) -> float:
        """When a reference was last written or asked for again, in seconds since 1970. Raises StoreError."""
        with reading(self._root):
            return self._path(name).stat().st_mtime

    def touch(self, name: str) -> None:
        """Let a reference that stands count as written now, and on disk, if it is ours. Raises StoreError."""
        path = self._path(name)
        with writing(self._root), suppress(PermissionError, FileNotFoundError):  # forgotten meanwhile
            os.utime(path)
            if self._sync:  # whoever wrote it may have been killed before
                make_folder(path.parent, sync=True)
                sync_folder(path.parent)

    def sync_all(self) -> None:
        """Make every name in every folder survive a power loss, whoever wrote it."""
        with writing(self._root):
            for folder, _, _ in os.walk(self._path(".")) if self._sync else ():
                sync_folder(Path(folder))

    def all_names(self) -> list[str]:
        """Names of all files below the four folders, in their order, sorted within each."""
        return [
            *(f"{folder}/{name}" for folder in ("artifacts", "steps") for name in self.names(folder)),
            *self.spoken_names(),
        ]

    def spoken_names(self) -> list[str]:
        """Those that people give: names below runs and tags."""
        folders = [*(f"runs/{run}" for run in self.names("runs")), "tags"]
        return [f"{folder}/{name}" for folder in folders for name in self.names(folder)]

    def names(self, folder: str) -> list[str]:
        """Names directly in a folder, sorted; none if nothing is there, or in a run's place a stray file.

        Raises StoreError, code "disk", for a file or a dead link where there should be a folder.
        """
        path = self._path(folder)
        with reading(self._root):
            try:
                return sorted(name for name in os.listdir(path) if not name.startswith("."))
            except (FileNotFoundError, NotADirectoryError):
                if path.is_symlink() or (folder in REFERENCE_FOLDERS and path.exists()):
                    raise
                return []

    def lost_folders(self) -> list[str]:
        """The four folders, with which a store is made, that are not there, and runs that are dead links."""
        with reading(self._root):
            lost = [folder for folder in REFERENCE_FOLDERS if not self._path(folder).is_dir()]
            runs = [f"runs/{run}" for run in self.names("runs")] if "runs" not in lost else []
            return lost + [run for run in runs if not self._path(run).exists()]

    def require_folders(self) -> None:
        """StoreError, code "disk", if one of the four folders is lost, or a run is a dead link."""
        if lost := self.lost_folders():
            raise StoreError(
                "disk",
                f"{self._path(lost[0])} is no folder, so what its references keep is not known: bring it "
                "back, or make it if it held none",
            )

    def strays(self) -> list[Path]:
        """What no reference can be: other names beside the four folders, and files among the runs."""
        with reading(self._root):
            others = [path for path in self._path(".").glob("[!.]*") if path.name not in REFERENCE_FOLDERS]
            return sorted(others + [path for path in self._path("runs").glob("[!.]*") if path.is_file()])

    def _path(self, name: str) -> Path:
        return self._root / "refs" / name
