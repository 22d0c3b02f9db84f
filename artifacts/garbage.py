"""Collecting garbage: objects that no reference reaches go into quarantine, and days later for good.

The collector holds the store alone. It first syncs every folder of references: a name that a killed process
moved without syncing could otherwise move back at a power loss, to an object that is gone by then.
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from artifacts.disk_errors import reading, writing
from artifacts.records import reference_objects
from artifacts.selection import reachable
from artifacts.store import Progress, Store

LONGEST_KEEPING = 36_500
"""The most days that `collect` can be asked to keep the quarantine: a century."""


@dataclass(frozen=True)
class Collected:
    """What a collection removed, or would remove."""

    references: list[str]
    objects: list[str]
    """Digests of the objects moved into quarantine."""
    size: int
    """Bytes of these objects."""
    temporary: list[Path]
    """Files that killed processes left."""
    purged: list[Path]
    """Folders of the quarantine deleted for good."""
    abandoned: list[Path]
    """Folders of what steps were to go on from, which nothing has touched for the days that are kept."""


def collect(
    store: Store,
    *,
    unnamed: bool = False,
    keep_days: int = 7,
    dry_run: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Collected:
    """Move every object that no reference reaches into quarantine, and purge what was put there long ago.

    unnamed: first drop the memo of all that neither a run nor a tag reaches, its inputs included.
    keep_days: how many days the quarantine keeps objects, 0 to 36,500; with 0 what is moved there now goes
    for good. dry_run: only say what would be removed. Raises StoreError, code "damaged-reference", for one
    that cannot be read, before anything is removed: what it reaches is not known. ValueError for other days.
    """
    if not 0 <= keep_days <= LONGEST_KEEPING:
        raise ValueError(f"keep_days must be between 0 and {LONGEST_KEEPING}, got {keep_days}")
    before = (datetime.now(UTC) - timedelta(days=keep_days or -1)).date()
    with store.lock.exclusive():
        store.references.sync_all()
        references = {name: store.read_reference(name) or b"" for name in store.reference_names()}
        reaches = {name: reference_objects(name, data) for name, data in references.items()}
        dropped = _unnamed(store, references) if unnamed else []
        reached = set().union(*(reaches[name] for name in references.keys() - set(dropped)))
        garbage = [digest for digest in store.digests() if digest not in reached]
        size = sum(store.objects.size(digest) for digest in garbage)
        with reading(store.root):
            found = sorted((store.root / "tmp").glob("*"))
            temporary = [path for path in found if path.is_file() and not path.is_symlink()]
        purged = store.objects.quarantined(before)
        abandoned = _abandoned(store, max(keep_days, 1))
        if not dry_run:
            for name in dropped:
                store.references.remove(name)
            for done, digest in enumerate(garbage):
                progress(done, len(garbage), "objects")
                store.objects.retire(digest)
            with writing(store.root):
                for path in temporary:
                    path.unlink()
                for folder in abandoned:
                    with suppress(FileNotFoundError):  # its step has just ended
                        shutil.rmtree(folder)
            purged = store.objects.purge(before)
    return Collected(dropped, garbage, size, temporary, purged, abandoned)


def _abandoned(store: Store, days: int) -> list[Path]:
    """Workspaces that have not changed for so many days and that nobody is at work in."""
    oldest = (datetime.now(UTC) - timedelta(days=days)).timestamp()
    found = []
    with reading(store.root):
        for folder in sorted((store.root / "work").glob("*")):
            with suppress(FileNotFoundError):
                at_work = (store.root / "locks" / f"{folder.name}.lock").exists()  # gone when its step ends
                if folder.is_dir() and folder.stat().st_mtime < oldest and not at_work:
                    found.append(folder)
    return found


def _unnamed(store: Store, references: Mapping[str, bytes]) -> list[str]:
    """Steps and artifacts that neither a run nor a tag reaches."""
    names = [name for name in references if name.startswith(("runs/", "tags/"))]
    kept = set(reachable(references, names, str(store.root))) if names else set()
    return [name for name in references if name not in kept]
