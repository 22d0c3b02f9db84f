"""Collecting garbage: objects that no reference reaches go into quarantine, and days later for good.

The collector holds the store alone. It first syncs every folder of references: a name that a killed process
moved without syncing could otherwise move back at a power loss, to an object that is gone by then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from artifacts.disk_errors import reading, writing
from artifacts.records import reference_objects
from artifacts.store import Store

Progress = Callable[[int, int, str], None]
"""Called with how much is done, of how much, and of what."""


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
    keep_days: how long the quarantine keeps objects, in days. dry_run: only say what would be removed.
    Raises StoreError, code "damaged-reference", for one that cannot be read: what it reaches is not known.
    """
    with store.lock.exclusive():
        store.references.sync_all()
        dropped = _unnamed(store) if unnamed else []
        kept = [name for name in store.reference_names() if name not in set(dropped)]
        reached = {
            digest for name in kept for digest in reference_objects(name, store.read_reference(name) or b"")
        }
        garbage = [digest for digest in store.digests() if digest not in reached]
        size = sum(store.objects.size(digest) for digest in garbage)
        with reading(store.root):
            temporary = sorted((store.root / "tmp").glob("*"))
        before = (datetime.now(UTC) - timedelta(days=keep_days)).date()
        purged = store.objects.quarantined(before)
        if not dry_run:
            for name in dropped:
                store.references.remove(name)
            for done, digest in enumerate(garbage):
                progress(done, len(garbage), "objects")
                store.objects.retire(digest)
            with writing(store.root):
                for path in temporary:
                    path.unlink()
            store.objects.purge(before)
    return Collected(dropped, garbage, size, temporary, purged)


def _unnamed(store: Store) -> list[str]:
    """Steps and artifacts that neither a run nor a tag reaches."""
    names = [*(f"runs/{run}" for run in store.runs()), *(f"tags/{tag}" for tag in store.tags())]
    kept = set(store.select(names)) if names else set()
    return [
        name
        for name in store.reference_names()
        if name.startswith(("artifacts/", "steps/")) and name not in kept
    ]
