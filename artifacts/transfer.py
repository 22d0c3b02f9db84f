"""Copying between a local store and a remote one: what is named, and everything it was made from.

The order makes it safe to stop anywhere: objects first, then the artifacts and steps that name them, then the
names of runs, then tags. What is there already is skipped, so the same command again goes on where it
stopped.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from artifacts.adoption import would_adopt
from artifacts.errors import StoreError
from artifacts.records import Tag, decode_tag, moves_forward, reference_objects
from artifacts.remote import RemoteStore
from artifacts.selection import all_objects, is_readable, selected
from artifacts.store import Progress, Store

_TAG_TRIES = 3


@dataclass(slots=True)
class Transferred:
    """What a transfer copied, or would copy; `skipped` counts objects and references that were there."""

    objects: int = 0
    bytes: int = 0
    references: int = 0
    skipped: int = 0
    copied: list[str] = field(default_factory=list, compare=False)
    """Digests, and names of references."""
    replaced: list[str] = field(default_factory=list, compare=False)
    """Stages of runs, `demo/train`, that meant something else where they were copied to."""


class Tally:
    """Counts what a transfer does and tells whoever wants to see it."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        """`total` is the number of bytes of all objects."""
        self.done = Transferred()
        self._seen, self._total, self._progress = 0, total, progress

    def saw(self, count: int, what: str) -> None:
        """So many bytes of an object are there now."""
        self._seen += count
        if self._progress:
            self._progress(self._seen, self._total, what)

    def object(self, size: int, digest: str) -> None:
        """An object was copied."""
        self.done.objects += 1
        self.done.bytes += size
        self.done.copied.append(digest)

    def reference(self, name: str, *, written: bool, is_new: bool = True) -> None:
        """A reference was copied, or was there; not `is_new`: there was another in its place."""
        if written:
            self.done.references += 1
            self.done.copied.append(name)
        else:
            self.done.skipped += 1
        if written and not is_new and name.startswith("runs/"):
            self.done.replaced.append(name.removeprefix("runs/"))
        self.saw(0, name)

    def skip(self, size: int, what: str) -> None:
        """An object was there."""
        self.done.skipped += 1
        self.saw(size, what)


def push(
    store: Store,
    remote: RemoteStore,
    names: Sequence[str] = (),
    progress: Progress | None = None,
    *,
    force: bool = False,
    dry_run: bool = False,
) -> Transferred:
    """Copy what names of runs, stages, tags or artifacts reach to a remote store; without names, everything.

    What they were made from goes with them. A run's name is replaced there. An artifact or step that is there
    stands if it is intact. A tag only moves on; with `force` one that was moved in both places means
    everywhere what it means here, and counts on from there. dry_run: only say what would be copied. Raises
    StoreError, besides what RemoteStore does: "unknown", "ambiguous"; "damaged-reference" for a reference
    here, "missing" or "damaged" for an object here; "tag-diverged", before anything is copied.
    """
    references = store.selected(names)
    sizes = {digest: _local_size(store, digest, size) for digest, size in all_objects(references).items()}
    there = remote.object_sizes()
    for name, data in _tags(references).items():
        _would_push(name, data, remote.read_reference(name), there, force)
    tally = Tally(sum(sizes.values()), progress)
    _push_objects(store, remote, sizes, there, tally, dry_run)
    there |= sizes
    if dry_run:
        _push_references(store, remote, references, there, tally, force, dry_run)
        return tally.done
    with remote.writers_lock():
        for digest in remote.keep_objects(sizes):  # collected before a reference named them
            remote.put_object(digest, store.path(store.ref("object", digest)))
        _push_references(store, remote, references, there, tally, force, dry_run)
        remote.keep_references(references)
    return tally.done


def _push_objects(
    store: Store,
    remote: RemoteStore,
    sizes: dict[str, int],
    there: dict[str, int],
    tally: Tally,
    dry_run: bool,
) -> None:
    for digest, size in sizes.items():
        if there.get(digest) == size:
            tally.skip(size, digest)
            continue
        if dry_run:
            tally.saw(size, digest)
        else:
            path = store.path(store.ref("object", digest))
            with remote.writers_lock():
                remote.put_object(digest, path, partial(tally.saw, what=digest))
        tally.object(size, digest)


def _push_references(
    store: Store,
    remote: RemoteStore,
    references: dict[str, bytes],
    there: dict[str, int],
    tally: Tally,
    force: bool,
    dry_run: bool,
) -> None:
    for name, data in references.items():
        standing = remote.read_reference(name)
        written = _would_push(name, data, standing, there, force)
        if written and not dry_run:
            written = _push_reference(store, remote, name, data, standing, force)
        tally.reference(name, written=written, is_new=standing is None)


def pull(
    store: Store,
    remote: RemoteStore,
    names: Sequence[str] = (),
    progress: Progress | None = None,
    *,
    force: bool = False,
    dry_run: bool = False,
) -> Transferred:
    """Copy from a remote store what `push` copies to one, by the same rules; repairs objects damaged here.

    force: a tag that was moved in both places, or is damaged here, becomes what it is there.
    dry_run: only say what would be copied. Raises StoreError, besides what RemoteStore and Store do:
    "unknown", "ambiguous"; "damaged-reference", "missing" or "damaged" for what is there and is not intact
    here; "tag-diverged", before anything is copied.
    """
    references = _selected(remote, names)
    _require_tags_move(store, references, force)
    there = remote.object_sizes()
    sizes = {
        digest: _pulled_size(store, remote, digest, size, there.get(digest))
        for digest, size in all_objects(references).items()
    }
    tally = Tally(sum(sizes.values()), progress)
    for digest, size in sizes.items():
        if is_intact(store, digest):
            tally.skip(size, digest)
            continue
        if dry_run:
            tally.saw(size, digest)
        else:
            store.adopt_object(digest, _seen(remote.get_object(digest, size), tally, digest), size)
        tally.object(size, digest)
    adopt(store, references, tally, force=force, dry_run=dry_run)
    return tally.done


def is_intact(store: Store, digest: str) -> bool:
    """Whether a local store has an object that hashes to its name, not only in quarantine."""
    return store.objects.is_intact(digest) and store.has(digest)


def adopt(store: Store, references: dict[str, bytes], tally: Tally, *, force: bool, dry_run: bool) -> None:
    """Give references, in the order to write them, to a local store.

    Raises StoreError; "tag-diverged" before any is written.
    """
    _require_tags_move(store, references, force)
    for name, data in references.items():
        standing = store.read_reference(name)
        if dry_run:
            written = would_adopt(store, name, data, force=force)
        else:
            written = store.adopt_reference(name, data, force=force)
        tally.reference(name, written=written, is_new=standing is None)


def _require_tags_move(store: Store, references: dict[str, bytes], force: bool) -> None:
    for name, data in _tags(references).items():
        would_adopt(store, name, data, force=force)


def _tags(references: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in references.items() if name.startswith("tags/")}


def _selected(remote: RemoteStore, names: Sequence[str]) -> dict[str, bytes]:
    try:
        return selected(remote.reference_names, remote.read_reference, names, remote.url)
    except StoreError as error:
        if error.code != "damaged-reference":
            raise
        raise StoreError(error.code, f"{remote.url}: {error}") from error


def _would_push(
    name: str, data: bytes, standing: bytes | None, there: Mapping[str, int], force: bool
) -> bool:
    """Whether a reference has to be written where `standing` is, and the objects `there` of these sizes."""
    if standing is None or standing == data:
        return standing is None
    if name.startswith("runs/"):
        return True
    if name.startswith("tags/"):
        return _tag_moves(name, data, standing, force)
    return not _stands(name, standing, there)


def _tag_moves(name: str, data: bytes, standing: bytes, force: bool) -> bool:
    try:
        return moves_forward(name.removeprefix("tags/"), _tag(name, standing), decode_tag(data, str))
    except StoreError as error:
        if force and error.code == "tag-diverged":
            return True
        raise


def _push_reference(
    store: Store, remote: RemoteStore, name: str, data: bytes, standing: bytes | None, force: bool
) -> bool:
    """Whether the reference was written; it is not if somebody else has just done so."""
    if name.startswith("tags/"):
        return _push_tag(store, remote, name, data, force)
    if name.startswith("runs/"):
        remote.replace_reference(name, data)
        return True
    return remote.swap_reference(name, data, standing)


def _push_tag(store: Store, remote: RemoteStore, name: str, data: bytes, force: bool) -> bool:
    """Whether the tag had to be moved there."""
    tag, short = decode_tag(data, str), name.removeprefix("tags/")
    for _ in range(_TAG_TRIES):  # somebody else may move it between our look and our move
        standing = remote.read_reference(name)
        there = _tag(name, standing)
        try:
            if not moves_forward(short, there, tag):
                return False
        except StoreError as error:
            if not (force and error.code == "tag-diverged"):
                raise
            tag = store.set_tag(short, tag.ref, after=tag, apart=there)
            data = store.read_reference(name) or b""
        if remote.swap_reference(name, data, standing):
            return True
    raise StoreError("tag-moved", f"{name} at {remote.url} is moved by others all the time: push again")


def _tag(name: str, data: bytes | None) -> Tag | None:
    return decode_tag(data, str) if data is not None and is_readable(name, data) else None


def _stands(name: str, data: bytes, there: Mapping[str, int]) -> bool:
    """Whether an artifact or step of a remote store can be read and its objects are there."""
    if not is_readable(name, data):
        return False
    sizes = reference_objects(name, data)
    return all(there.get(digest) == size for digest, size in sizes.items() if size is not None)


def _local_size(store: Store, digest: str, size: int | None) -> int:
    return store.path(store.ref("object", digest)).stat().st_size if size is None else size


def _pulled_size(store: Store, remote: RemoteStore, digest: str, size: int | None, found: int | None) -> int:
    """The size of an object that is intact here, or has this size, if it is known, in the remote store."""
    if found is not None and size in (None, found):
        return found
    if is_intact(store, digest):
        return store.objects.size(digest)
    raise remote.unusable("missing" if found is None else "damaged", digest)


def _seen(chunks: Iterable[bytes], tally: Tally, what: str) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        tally.saw(len(chunk), what)
