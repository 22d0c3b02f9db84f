"""Copying between a local store and a remote one: what is named, and everything it was made from.

The order makes it safe to stop anywhere: objects first, then the artifacts and steps that name them, then the
names of runs, then tags. What is there already is skipped, so the same command again goes on where it
stopped.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from artifacts.errors import StoreError
from artifacts.records import Tag, decode_tag, moves_forward, reference_objects
from artifacts.remote import RemoteStore
from artifacts.selection import all_objects, is_readable, reachable
from artifacts.store import Store

Progress = Callable[[int, int, str], None]
"""Called with the bytes of objects done, the total, and the digest or reference that is being copied."""

_TAG_TRIES = 3


@dataclass(slots=True)
class Transferred:
    """What a transfer copied; `skipped` counts the objects and references that were there already."""

    objects: int = 0
    bytes: int = 0
    references: int = 0
    skipped: int = 0


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

    def object(self, size: int) -> None:
        """An object was copied."""
        self.done.objects += 1
        self.done.bytes += size

    def reference(self, name: str, *, written: bool) -> None:
        """A reference was copied, or was there."""
        if written:
            self.done.references += 1
        else:
            self.done.skipped += 1
        self.saw(0, name)

    def skip(self, size: int, what: str) -> None:
        """An object was there."""
        self.done.skipped += 1
        self.saw(size, what)


def push(
    store: Store, remote: RemoteStore, names: Sequence[str] = (), progress: Progress | None = None
) -> Transferred:
    """Copy what names of runs, stages, tags or artifacts reach to a remote store; without names, everything.

    What they were made from goes with them. A run's name is replaced there. An artifact or step that is there
    stands if it is intact. A tag only moves on. References that are damaged here count as absent. Raises
    StoreError, besides what RemoteStore does: "unknown"; "missing" or "damaged" for an object here,
    "tag-diverged".
    """
    references = readable(store, names)
    sizes = {digest: _local_size(store, digest, size) for digest, size in all_objects(references).items()}
    tally = Tally(sum(sizes.values()), progress)
    with remote.writers_lock():
        for digest, size in sizes.items():
            if remote.has(digest, size):
                tally.skip(size, digest)
            else:
                path = store.path(store.ref("object", digest))
                remote.put_object(digest, path, partial(tally.saw, what=digest))
                tally.object(size)
        for name, data in references.items():
            tally.reference(name, written=_push_reference(remote, name, data))
    return tally.done


def pull(
    store: Store, remote: RemoteStore, names: Sequence[str] = (), progress: Progress | None = None
) -> Transferred:
    """Copy from a remote store what `push` copies to one, by the same rules; repairs objects damaged here.

    Raises StoreError, besides what RemoteStore and Store do: "unknown"; "damaged-reference", "missing" or
    "damaged" for what is there, "tag-diverged".
    """
    references = _selected(remote, names)
    sizes = {digest: _remote_size(remote, digest, size) for digest, size in all_objects(references).items()}
    tally = Tally(sum(sizes.values()), progress)
    for digest, size in sizes.items():
        if is_intact(store, digest):
            tally.skip(size, digest)
        else:
            remote.require(digest, size)
            store.adopt_object(digest, _seen(remote.get_object(digest, size), tally, digest), size)
            tally.object(size)
    for name, data in references.items():
        tally.reference(name, written=adopt(store, name, data))
    return tally.done


def readable(store: Store, names: Sequence[str]) -> dict[str, bytes]:
    """The selected references of a local store by name, in the order to write them, without damaged ones."""
    found = {}
    for name in store.select(names):
        data = store.read_reference(name)
        if data is not None and is_readable(name, data):
            found[name] = data
    return found


def is_intact(store: Store, digest: str) -> bool:
    """Whether a local store has an object that hashes to its name."""
    try:
        store.check(store.ref("object", digest))
    except StoreError as error:
        if error.code not in ("missing", "damaged"):
            raise
        return False
    return store.has(digest)  # not only in quarantine


def adopt(store: Store, name: str, data: bytes) -> bool:
    """Give a reference to a local store; whether anything changed. Raises StoreError."""
    before = store.read_reference(name)
    store.adopt_reference(name, data)
    return store.read_reference(name) != before


def _selected(remote: RemoteStore, names: Sequence[str]) -> dict[str, bytes]:
    present = {name: remote.read_reference(name) for name in remote.reference_names()}
    there = {name: data for name, data in present.items() if data is not None}
    references = {name: there[name] for name in reachable(there, names, remote.url)}
    for name, data in references.items():
        if not is_readable(name, data):
            remedy = "push it again from a store that has it"
            raise StoreError("damaged-reference", f"reference {name} at {remote.url} is damaged: {remedy}")
    return references


def _push_reference(remote: RemoteStore, name: str, data: bytes) -> bool:
    """Whether the reference had to be written."""
    standing = remote.read_reference(name)
    if standing == data:
        return False
    if name.startswith("tags/"):
        return _push_tag(remote, name, data)
    if name.startswith("runs/"):
        remote.replace_reference(name, data)
        return True
    if standing is None:
        if remote.create_reference(name, data):
            return True
        standing = remote.read_reference(name)
    if standing is None or _stands(remote, name, standing):
        return False
    return remote.swap_reference(name, data, standing)


def _push_tag(remote: RemoteStore, name: str, data: bytes) -> bool:
    tag = decode_tag(data, str)
    for _ in range(_TAG_TRIES):  # somebody else may move it between our look and our move
        standing = remote.read_reference(name)
        if not moves_forward(name.removeprefix("tags/"), _tag(name, standing), tag):
            return False
        if remote.swap_reference(name, data, standing):
            return True
    raise StoreError("tag-moved", f"{name} at {remote.url} is moved by others all the time: push again")


def _tag(name: str, data: bytes | None) -> Tag | None:
    return decode_tag(data, str) if data is not None and is_readable(name, data) else None


def _stands(remote: RemoteStore, name: str, data: bytes) -> bool:
    """Whether an artifact or step of a remote store can be read and its objects are there."""
    if not is_readable(name, data):
        return False
    sizes = reference_objects(name, data)
    return all(remote.size(digest) == size for digest, size in sizes.items() if size is not None)


def _local_size(store: Store, digest: str, size: int | None) -> int:
    return store.path(store.ref("object", digest)).stat().st_size if size is None else size


def _remote_size(remote: RemoteStore, digest: str, size: int | None) -> int:
    return remote.require(digest) if size is None else size


def _seen(chunks: Iterable[bytes], tally: Tally, what: str) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        tally.saw(len(chunk), what)
