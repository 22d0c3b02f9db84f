"""Checking a whole store: every reference can be read, every object is there and is what it is called."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from artifacts.adoption import require_artifact
from artifacts.bundle_manifest import is_digest
from artifacts.disk_errors import reading
from artifacts.errors import StoreError
from artifacts.records import reference_objects
from artifacts.store import Progress, Store


@dataclass(frozen=True)
class Problem:
    """Something in a store that is not as it should be."""

    code: str
    """"damaged", "missing", "quarantined", "damaged-reference", "lost-folder", "bad-name" or "stray"."""
    where: str
    """A digest, the name of a reference, or a path."""
    message: str


@dataclass
class Checked:
    """What was looked at, and what is wrong with it."""

    objects: int = 0
    size: int = 0
    """Bytes of all objects."""
    references: int = 0
    problems: list[Problem] = field(default_factory=list)


def check_store(
    store: Store,
    *,
    full: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Checked:
    """Check all references, and that their objects are there in their sizes.

    With `full`, hash every object, and read the manifest of every artifact, whose id must be its name's. If a
    folder of references is lost, none is checked.
    Changes nothing and takes no lock: what other processes write meanwhile may be looked at or not.
    Raises StoreError only if the disk refuses.
    """
    checked = Checked()
    sizes = {digest: store.objects.size(digest) for digest in store.digests()}
    checked.objects, checked.size = len(sizes), sum(sizes.values())
    lost = store.references.lost_folders()
    checked.problems += [_lost(store, folder) for folder in lost]
    for name in [] if lost else store.references.all_names():
        checked.references += 1
        checked.problems += _reference_problems(store, name, sizes)
    checked.problems += _strays(store)
    if full:
        checked.problems += _damaged(store, sizes, progress)
    if full and not lost:
        checked.problems += _misnamed(store, {problem.where for problem in checked.problems})
    return checked


def _lost(store: Store, folder: str) -> Problem:
    message = "is no folder, so no reference was checked: bring it back, or make it if it held none"
    return Problem("lost-folder", str(store.root / "refs" / folder), message)


def _reference_problems(store: Store, name: str, sizes: dict[str, int]) -> Iterator[Problem]:
    data = store.read_reference(name)
    if data is None:
        return  # removed or replaced meanwhile
    try:
        named = reference_objects(name, data)
    except StoreError as error:
        yield Problem(error.code, name, str(error))
        return
    for digest, size in named.items():
        if digest not in sizes and not store.has(digest):
            if store.read_reference(name) == data:  # else it moved on, and the object was collected meanwhile
                yield _absent(store, name, digest)
        elif size not in (None, sizes.get(digest, size)):
            yield Problem("damaged", digest, f"has {sizes[digest]} bytes where {name} says {size}")


def _absent(store: Store, name: str, digest: str) -> Problem:
    if store.objects.in_quarantine(digest):
        message = f"names object {digest}, which is in quarantine: `riftco store gc` brings it back"
        return Problem("quarantined", name, message)
    return Problem("missing", name, f"names object {digest}, which is not here: run its step again")


def _strays(store: Store) -> Iterator[Problem]:
    for path in store.references.strays():
        yield Problem("stray", str(path), "is no reference: move it away or delete it")
    with reading(store.root):
        for path in sorted((store.root / "objects").rglob("*")):
            if path.is_dir() and not path.is_symlink():
                continue
            named = is_digest(path.name) and path == store.objects.path(path.name)
            if not named or path.is_symlink() or not path.is_file():
                yield Problem("stray", str(path), "is no object: delete it")


def _misnamed(store: Store, known: set[str]) -> Iterator[Problem]:
    """Artifacts whose objects are intact and of another id; `known` objects are damaged anyway."""
    for artifact_id, ref in store.artifacts().items():
        if ref.digest not in known and store.has(ref.digest):
            try:
                require_artifact(store, artifact_id, ref)
            except StoreError as error:
                if error.code not in ("damaged-reference", "missing"):
                    raise
                yield Problem(error.code, f"artifacts/{artifact_id}", str(error))


def _damaged(store: Store, sizes: dict[str, int], progress: Progress) -> Iterator[Problem]:
    total, done = sum(sizes.values()), 0

    def problem(digest: str) -> Problem | None:
        try:
            store.objects.check(digest)
        except StoreError as error:
            if error.code not in ("damaged", "missing"):
                raise
            if store.has(digest):  # else it was collected meanwhile
                return Problem(error.code, digest, str(error))
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing releases the interpreter's lock
        for digest, found in zip(sizes, pool.map(problem, sizes), strict=True):
            done += sizes[digest]
            progress(done, total, "bytes")
            if found:
                yield found
