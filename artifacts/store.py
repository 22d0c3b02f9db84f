"""The store: content-addressed objects, the memo from a step's key to its results, and names for people.

Three things kept apart: a digest says what an object is, a step key how it was made, a name what people call
it. Everything lies in one folder that can be moved or copied, and that any number of processes may use.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO, Literal, Self, TypeVar

from artifacts.adoption import require_artifact, would_adopt
from artifacts.bundle import ModelBundle
from artifacts.bundle_manifest import is_digest
from artifacts.checkpoint import TrainingCheckpoint
from artifacts.errors import StoreError
from artifacts.files import write_atomic
from artifacts.locking import StoreLock
from artifacts.lookup import objects, resolve, run_called
from artifacts.object_folder import ObjectFolder, read_chunks
from artifacts.records import (
    Ref,
    RunStage,
    StepRecord,
    Tag,
    UriOf,
    damaged_reference,
    decode_record,
    decode_ref,
    decode_stage,
    decode_tag,
    encode_record,
    encode_ref,
    encode_stage,
    encode_tag,
    is_name,
    is_reference_name,
    reference_objects,
    require_name,
)
from artifacts.reference_folder import ReferenceFolder
from artifacts.selection import selected
from artifacts.step_key import step_key
from artifacts.store_folder import ensure, locate, require
from artifacts.workspace import Workspace

Durability = Literal["full", "none"]
Decoded = TypeVar("Decoded")

Progress = Callable[[int, int, str], None]
"""Is told of long work on a store: how much is done, of how much, and of what."""


class Store:
    """A store in a local folder, opened by `Store.open`. All methods raise StoreError if the disk refuses."""

    def __init__(self, root: Path, *, durability: Durability = "full") -> None:
        """For `open`, which also makes sure that `root` is a store."""
        self._sync = sync = durability != "none"
        self.root = root
        self.lock = StoreLock(root)
        self.objects = ObjectFolder(root, sync=sync)
        self.references = ReferenceFolder(root, sync=sync)

    @classmethod
    def open(
        cls, root: Path | str | None = None, *, create: bool = True, durability: Durability = "full"
    ) -> Self:
        """Open the store in a folder; with `create`, one that is new or empty becomes a store.

        Without `root`: $RIFTCO_STORE, else $RIFTCO_HOME/store, else .riftco/store in the current folder.
        With durability "none", for tests, a power loss may cost what was written; a killed process does not.
        Raises StoreError, code "not-a-store", for a folder that holds something else, or, without `create`,
        nothing.
        """
        folder = locate(root)
        if create:
            ensure(folder, sync=durability != "none")
        else:
            require(folder)
        return cls(folder, durability=durability)

    @classmethod
    def preview(cls, root: Path | str | None = None) -> Self:
        """The store that `open` would open or make, for looking only: an absent one is empty and not made.

        Raises StoreError as `open` does.
        """
        folder = locate(root)
        if folder.exists() and not (folder.is_dir() and not os.listdir(folder)):
            require(folder)
        return cls(folder)

    # Objects

    def put_bytes(self, kind: str, data: bytes) -> Ref:
        """Store bytes as an object of a kind, a short word such as "metrics"."""
        return self._put(kind, [data], len(data))

    def put_file(self, kind: str, path: Path | str) -> Ref:
        """Store a copy of a file's bytes. Raises OSError if the file cannot be opened."""
        with Path(path).open("rb") as stream:
            return self._put(kind, read_chunks(stream), os.fstat(stream.fileno()).st_size)

    def put_bundle(self, bundle: ModelBundle) -> Ref:
        """Store a bundle, and a reference to it under its artifact id."""
        return self._put_artifact("bundle", bundle.artifact_id, bundle.chunks())

    def put_checkpoint(self, checkpoint: TrainingCheckpoint) -> Ref:
        """Store a checkpoint, and a reference to it under its checkpoint id."""
        return self._put_artifact("checkpoint", checkpoint.checkpoint_id, checkpoint.chunks())

    def _put_artifact(self, kind: str, artifact_id: str, chunks: Iterable[bytes | memoryview]) -> Ref:
        chunks = list(chunks)
        size = sum(len(chunk) for chunk in chunks)
        ref = self._put(kind, chunks, size)
        self.adopt_reference(f"artifacts/{artifact_id}", encode_ref(ref, size))
        return ref

    def _put(self, kind: str, chunks: Iterable[bytes | memoryview], size: int) -> Ref:
        require_name("kind", kind)
        return self.ref(kind, self.objects.put(chunks, size, publishing=self.lock.shared()))

    def adopt_object(self, digest: str, chunks: Iterable[bytes | memoryview], size: int) -> None:
        """Store bytes from elsewhere; StoreError, code "damaged", unless they hash to `digest`."""
        self.objects.put(chunks, size, expected=digest, publishing=self.lock.shared())

    def ref(self, kind: str, digest: str) -> Ref:
        """A reference to an object of this store, whether it is there or not."""
        return Ref(kind, digest, self._uri(digest))

    def has(self, digest: str) -> bool:
        """Whether an object of this digest is here, intact or not."""
        return self.objects.has(digest)

    def path(self, ref: Ref) -> Path:
        """The object's file, read-only and never changed; StoreError, code "missing", if it is absent."""
        return self.objects.locate(ref.digest)

    def read_bytes(self, ref: Ref) -> bytes:
        """The object's bytes; StoreError, code "missing" or "damaged", unless they hash to the digest."""
        return self.objects.read(ref.digest)

    def load_bundle(self, ref: Ref) -> ModelBundle:
        """The bundle, checked against the digest; StoreError, code "wrong-kind", for any other kind."""
        self._check_kind(ref, "bundle")
        return self.objects.use(ref.digest, ModelBundle.load)

    def load_checkpoint(self, ref: Ref) -> TrainingCheckpoint:
        """The checkpoint, checked against the digest; StoreError, code "wrong-kind", for any other kind."""
        self._check_kind(ref, "checkpoint")
        return self.objects.use(ref.digest, TrainingCheckpoint.load)

    def _check_kind(self, ref: Ref, kind: str) -> None:
        if ref.kind != kind:
            raise StoreError("wrong-kind", f"object {ref.digest} is of kind {ref.kind!r}, not a {kind}")
        self.check(ref)

    def get(self, ref: Ref, path: Path | str) -> Path:
        """Write a copy of the object to a file, replacing it; checked first, as `check` does.

        Raises what `write_atomic` does for a path that cannot be written.
        """
        with self.stream(ref) as stream:
            return write_atomic(path, read_chunks(stream))

    def stream(self, ref: Ref) -> BinaryIO:
        """The object's file, open for reading; checked first, as `check` does."""
        self.check(ref)
        return self.objects.use(ref.digest, lambda source: source.open("rb"))

    def check(self, ref: Ref) -> None:
        """Raise StoreError, code "missing" or "damaged", unless the object exists and hashes to its name."""
        self.objects.check(ref.digest)

    def digests(self, prefix: str = "") -> list[str]:
        """Digests of all objects that begin with `prefix`, hex digits."""
        return sorted(self.objects.digests(prefix))

    def artifacts(self) -> dict[str, Ref]:
        """References to all bundles and checkpoints by their ids, without damaged ones."""
        names = [name for name in self.references.names("artifacts") if is_digest(name)]
        refs = {name: self._read(f"artifacts/{name}", decode_ref) for name in names}
        return {name: ref for name, ref in refs.items() if ref}

    # Steps

    def recall(self, key: str) -> StepRecord | None:
        """The record of the step with this key, or None if there is none, or it is damaged.

        The objects it names are not checked.
        """
        return self._read(f"steps/{_checked_key(key)}", lambda data, uri: decode_record(key, data, uri))

    def remember(self, key: str, record: StepRecord) -> StepRecord:
        """Keep a step's record, all of whose objects must be in the store; returns the record that stands.

        The first record of a key stands, unless it or one of its objects is missing or damaged. Raises
        ValueError unless the key is that of the record's recipe.
        """
        name = f"steps/{_checked_key(key)}"
        if key != step_key(record.step, record.version, record.recipe):
            raise ValueError(f"step key {key} is not that of {record.step}'s recipe: use step_key")
        with self.lock.shared():
            self._adopt(name, encode_record(key, record, self._kept(record)), force=False)
            return self.recall(key) or record

    def steps(self) -> dict[str, StepRecord]:
        """All step records by key."""
        records = {key: self.recall(key) for key in self.references.names("steps") if is_digest(key)}
        return {key: record for key, record in records.items() if record}

    def workspace(self, key: str) -> Workspace:
        """Where the step with this key keeps what it can go on from while it is at work."""
        return Workspace(self.root / "work" / _checked_key(key), sync=self._sync)

    # Names

    def name_run(self, run: str, stage: str, key: str, record: StepRecord) -> None:
        """Let `run/stage` mean this step from now on, whatever it meant before."""
        require_name("run", run)
        require_name("stage", stage)
        _checked_key(key)
        with self.lock.shared():
            before = self._read(f"runs/{run}/{stage}", decode_stage)
            previous = None
            if before:
                previous = before.previous if before.key == key else before.key
            data = encode_stage(RunStage(key, record, previous), self._kept(record))
            self.references.replace(f"runs/{run}/{stage}", data)

    def forget(self, run: str) -> None:
        """Remove the names of a run; what they named stays until garbage is collected."""
        require_name("run", run)
        with self.lock.shared():
            for stage in self.references.names(f"runs/{run}"):
                self.references.remove(f"runs/{run}/{stage}")

    def run_stages(self, run: str) -> dict[str, RunStage]:
        """Key and record of each stage of a run, in alphabetical order, without damaged ones."""
        require_name("run", run)
        names = [name for name in self.references.names(f"runs/{run}") if is_name(name)]
        stages = {name: self._read(f"runs/{run}/{name}", decode_stage) for name in names}
        return {name: stage for name, stage in stages.items() if stage}

    def stage(self, run: str, stage: str) -> RunStage | None:
        """Key and record of a stage, or None if there is none.

        Raises StoreError, code "damaged-reference", if it cannot be read.
        """
        require_name("run", run)
        require_name("stage", stage)
        return self._read_strictly(f"runs/{run}/{stage}", decode_stage)

    def runs(self) -> list[str]:
        """Names of all runs that have stages, sorted."""
        names = [name for name in self.references.names("runs") if is_name(name)]
        return [name for name in names if self.references.names(f"runs/{name}")]

    def tag(self, name: str) -> Tag | None:
        """What a tag means now, or None if there never was one of this name.

        Raises StoreError, code "damaged-reference", if it cannot be read.
        """
        require_name("tag", name)
        return self._read_strictly(f"tags/{name}", decode_tag)

    def tags(self) -> dict[str, Ref]:
        """What all tags mean, by name, without damaged ones."""
        names = [name for name in self.references.names("tags") if is_name(name)]
        found = {name: self._read(f"tags/{name}", decode_tag) for name in names}
        return {name: tag.ref for name, tag in found.items() if tag and tag.ref}

    def set_tag(
        self, name: str, ref: Ref | None, after: Tag | None, *, apart: Tag | None = None, force: bool = False
    ) -> Tag:
        """Let a tag mean an object, or with None nothing more, if it still is `after`: what `tag` returned.

        apart: a copy of the tag elsewhere that was moved on its own: the tag moves on from there instead.
        force: a damaged tag counts as none. Raises StoreError: "tag-moved" if somebody else has moved it
        since, "damaged-reference".
        """
        require_name("tag", name)
        with self.lock.shared(), self.lock.tags():
            standing = self._read(f"tags/{name}", decode_tag) if force else self.tag(name)
            if standing != after:
                raise StoreError("tag-moved", f"tag {name} was moved by somebody else: look at it again")
            moves = max(tag.sequence if tag else 0 for tag in (after, apart))
            base = apart or after
            tag = base.moved(ref, moves + 1) if base else Tag(ref, 1)
            self.references.replace(
                f"tags/{name}", encode_tag(tag, lambda ref: self.objects.keep(ref.digest))
            )
        return tag

    def resolve(self, text: str) -> Ref:
        """The object meant by a tag, `run/stage`, `run/stage/result`, an artifact id or a digest.

        A stage means its bundle, else its first result; `runs/` may come first; 6 digits of an id are enough.
        Raises StoreError: "unknown", with near matches in the message, or "ambiguous".
        """
        return resolve(self, text)

    def objects_of(self, text: str) -> list[Ref]:
        """All objects that a name means: those of each stage of a run, each result of a stage, else one.

        Raises StoreError as `resolve` does, and "damaged-reference" for a stage or tag that cannot be read.
        """
        return objects(self, text)

    def run_called(self, text: str) -> str | None:
        """The run that a name means, if it means a run, and not a tag, a stage or an object."""
        return run_called(self, text)

    # References as such, for moving them between stores

    def reference_names(self) -> list[str]:
        """Names of all references, such as `runs/demo/pretrain`: artifacts, steps, runs, then tags.

        Damaged ones included, but not files that no reference can be called.
        """
        return list(filter(is_reference_name, self.references.all_names()))

    def spoken_names(self) -> list[str]:
        """Those of them that people give: runs and tags."""
        return list(filter(is_reference_name, self.references.spoken_names()))

    def read_reference(self, name: str) -> bytes | None:
        """The bytes of a reference as they lie on the disk, or None."""
        return self.references.read(name)

    def select(self, names: Sequence[str] = ()) -> list[str]:
        """Names of the references to some runs, stages, tags or artifacts and to all they were made from.

        All of them without `names`, in the order in which they can be written. Raises StoreError: "unknown",
        "ambiguous", "damaged-reference".
        """
        return list(self.selected(names))

    def selected(self, names: Sequence[str] = ()) -> dict[str, bytes]:
        """The references that `select` names, with their bytes."""
        return selected(self.reference_names, self.references.read, names, f"the store {self.root}")

    def adopt_reference(self, name: str, data: bytes, *, force: bool = False) -> bool:
        """Write a reference that has come from elsewhere, all of whose objects must be here.

        An artifact or step that is here stands if it is intact; a run's name is replaced; tags only move on,
        unless, with `force`, they are damaged here or were moved in both places. Returns whether it was
        written. Raises StoreError: "bad-name", "damaged-reference", "missing", "damaged" or "tag-diverged".
        """
        sizes = reference_objects(name, data)
        with self.lock.shared():
            for digest, size in sizes.items():
                if self.objects.keep(digest) != size and size is not None:
                    raise StoreError("damaged", f"{name} says that object {digest} has {size} bytes")
            if name.startswith("artifacts/"):
                require_artifact(self, name.removeprefix("artifacts/"), decode_ref(data, self._uri))
            return self._adopt(name, data, force=force)

    def _adopt(self, name: str, data: bytes, *, force: bool) -> bool:
        with self.lock.tags() if name.startswith("tags/") else nullcontext():
            if name.startswith(("artifacts/", "steps/")) and self.references.create(name, data):
                return True
            if not would_adopt(self, name, data, force=force):
                self.references.touch(name)
                return False
            self.references.replace(name, data)
        return True

    def _read(self, name: str, decode: Callable[[bytes, UriOf], Decoded]) -> Decoded | None:
        """The decoded reference; None if it is absent or damaged, for making it again writes it again."""
        try:
            return self._read_strictly(name, decode)
        except StoreError as error:
            if error.code != "damaged-reference":
                raise
            return None

    def _read_strictly(self, name: str, decode: Callable[[bytes, UriOf], Decoded]) -> Decoded | None:
        data = self.references.read(name)
        try:
            return decode(data, self._uri) if data is not None else None
        except StoreError as error:
            raise damaged_reference(name, error) from error

    def _kept(self, record: StepRecord) -> Callable[[Ref], int]:
        """Sizes of a record's results; they and its inputs are here and stay once the record is written."""
        for ref in record.inputs().values():
            self.objects.keep(ref.digest)
        return {ref: self.objects.keep(ref.digest) for ref in record.results.values()}.__getitem__

    def _uri(self, digest: str) -> str:
        return self.objects.path(digest).as_uri()


def _checked_key(key: str) -> str:
    if not is_digest(key):
        raise ValueError(f"a step key is 64 lower-case hex digits, got {key!r}")
    return key
