"""Collecting garbage: objects that no reference reaches go into quarantine, and days later for good.

The collector holds the store alone. It first syncs every folder of references: a name that a killed process
moved without syncing could otherwise move back at a power loss, to an object that is gone by then. And it
first brings back what references reach in quarantine: they may have been lost for a while, too.
"""

import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from stat import S_ISREG

from artifacts.bundle_manifest import is_digest
from artifacts.disk_errors import reading, writing
from artifacts.locking import hold_if_free
from artifacts.records import reference_objects
from artifacts.selection import upstream
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
    returned: list[str]
    """Digests of objects in quarantine that references reach, brought back."""
    spared: list[str]
    """Unnamed references that were kept because they are young, and what those were made from."""
    temporary: list[Path]
    """Staged files that killed processes left: older than a day, or any if nothing is kept."""
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

    unnamed: first drop the memo of all that neither a run nor a tag reaches, its inputs included, unless it
    was written within a day: a step at work names its results at its end. keep_days: how many days the
    quarantine keeps objects, 0 to 36,500; with 0, for a store that nobody writes to, what is moved there now
    goes for good, and nothing is too young. dry_run: only say what would be removed. Raises StoreError before
    anything is removed if what is reached is not known: "damaged-reference" for one that cannot be read,
    "disk" for a folder of references that is lost. ValueError for other days.
    """
    if not 0 <= keep_days <= LONGEST_KEEPING:
        raise ValueError(f"keep_days must be between 0 and {LONGEST_KEEPING}, got {keep_days}")
    with store.lock.exclusive():
        store.references.require_folders()
        store.references.sync_all()
        plan = _planned(store, unnamed, keep_days)
        return plan if dry_run else _carried_out(store, plan, keep_days, progress)


def _planned(store: Store, unnamed: bool, keep_days: int) -> Collected:
    references = {name: store.read_reference(name) or b"" for name in store.reference_names()}
    reaches = {name: reference_objects(name, data) for name, data in references.items()}
    young = _days_ago(min(keep_days, 1)).timestamp()
    named = upstream(references, {name for name in references if name.startswith(("runs/", "tags/"))})
    recent = {name for name in references if unnamed and store.references.written(name) > young}
    kept = named | upstream(references, recent) if unnamed else references.keys()
    spared = sorted(kept - named) if unnamed else []
    dropped = [name for name in references if name not in kept]
    reached = set().union(*(reaches[name] for name in references.keys() - set(dropped)))
    present = store.digests()
    garbage = [digest for digest in present if digest not in reached]
    return Collected(
        dropped,
        garbage,
        sum(store.objects.size(digest) for digest in garbage),
        sorted((reached - set(present)).intersection(store.objects.in_quarantine())),
        spared,
        _left_behind(store, young),
        store.objects.quarantined(_purged_before(keep_days)),
        _abandoned(store, keep_days, delete=False),
    )


def _carried_out(store: Store, plan: Collected, keep_days: int, progress: Progress) -> Collected:
    for digest in plan.returned:
        store.objects.keep(digest)
    for name in plan.references:
        store.references.remove(name)
    for done, digest in enumerate(plan.objects):
        progress(done, len(plan.objects), "objects")
        store.objects.retire(digest)
    with writing(store.root):
        for path in plan.temporary:
            path.unlink(missing_ok=True)
    abandoned = _abandoned(store, keep_days, delete=True)
    return replace(plan, abandoned=abandoned, purged=store.objects.purge(_purged_before(keep_days)))


def _left_behind(store: Store, young: float) -> list[Path]:
    """Staged files that are not young: a writer at work may still publish those."""
    found = []
    with reading(store.root):
        for path in sorted((store.root / "tmp").glob("*")):
            with suppress(FileNotFoundError):  # just published
                status = path.lstat()
                found += [path] if S_ISREG(status.st_mode) and status.st_mtime <= young else []
    return found


def _abandoned(store: Store, keep_days: int, *, delete: bool) -> list[Path]:
    """Workspaces that have not changed for the days that are kept, and that nobody is at work in."""
    untouched_since, found = _days_ago(max(keep_days, 1)).timestamp(), []
    with writing(store.root):
        for folder in sorted(filter(Path.is_dir, (store.root / "work").glob("*"))):
            with suppress(FileNotFoundError):  # its step has just ended
                if is_digest(folder.name) and folder.stat().st_mtime < untouched_since:
                    with hold_if_free(store.root / "locks" / f"{folder.name}.lock") as nobody_at_work:
                        if nobody_at_work and delete:
                            shutil.rmtree(folder)
                        found += [folder] if nobody_at_work else []
    return found


def _days_ago(days: int) -> datetime:
    return datetime.now(UTC) - timedelta(days=days)


def _purged_before(keep_days: int) -> date:
    return _days_ago(keep_days or -1).date()
