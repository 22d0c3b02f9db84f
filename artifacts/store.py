"""The store: content-addressed objects, the memo from a step's key to its results, and names for people.

Three things kept apart: a digest says what an object is, a step key how it was made, a name what people call
it. Everything lies in one folder that can be moved or copied, and that any number of processes may use.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

from artifacts.bundle import ModelBundle
from artifacts.bundle_manifest import is_digest
from artifacts.errors import StoreError
from artifacts.lookup import resolve
from artifacts.object_folder import ObjectFolder, read_chunks
from artifacts.records import (
    Ref,
    RunStage,
    StepRecord,
    decode_record,
    decode_ref,
    encode_record,
    encode_ref,
    is_name,
    require_name,
)
from artifacts.reference_folder import ReferenceFolder
from artifacts.store_folder import ensure, locate

Durability = Literal["full", "none"]


class Store:
    """A store in a local folder, opened by `Store.open`. All methods raise StoreError if the disk refuses."""

    def __init__(self, root: Path, *, durability: Durability = "full") -> None:
        """For `open`, which also makes sure that `root` is a store."""
        sync = durability != "none"
        self.root = root
        self._objects = ObjectFolder(root, sync=sync)
        self._references = ReferenceFolder(root, sync=sync)

    @classmethod
    def open(cls, root: Path | str | None = None, *, durability: Durability = "full") -> Self:
        """Open the store in a folder, creating it where the folder is new or empty.

        Without `root`: $RIFTCO_STORE, else $RIFTCO_HOME/store, else .riftco/store in the current folder.
        With durability "none", for tests, a power loss may cost what was written; a killed process does not.
        Raises StoreError, code "not-a-store", for a folder that holds something else.
        """
        folder = locate(root)
        ensure(folder, sync=durability != "none")
        return cls(folder, durability=durability)

    def put_bytes(self, kind: str, data: bytes) -> Ref:
        """Store bytes as an object of a kind, a short word such as "metrics"."""
        return self._put(kind, [data], len(data))

    def put_file(self, kind: str, path: Path | str) -> Ref:
        """Store a copy of a file's bytes. Raises OSError if the file cannot be opened."""
        with Path(path).open("rb") as stream:
            return self._put(kind, read_chunks(stream), os.fstat(stream.fileno()).st_size)

    def put_bundle(self, bundle: ModelBundle) -> Ref:
        """Store a bundle, and a reference to it under its artifact id."""
        chunks = list(bundle.chunks())
        ref = self._put("bundle", chunks, sum(len(chunk) for chunk in chunks))
        name, data = f"artifacts/{bundle.artifact_id}", encode_ref(ref, self._size(ref))
        if not self._references.create(name, data) and self._references.read(name) != data:
            self._references.replace(name, data)  # the id gives these bytes: the others were damage
        return ref

    def _put(self, kind: str, chunks: Iterable[bytes | memoryview], size: int) -> Ref:
        require_name("kind", kind)
        return self.ref(kind, self._objects.put(chunks, size))

    def ref(self, kind: str, digest: str) -> Ref:
        """A reference to an object of this store, whether it is there or not."""
        return Ref(kind, digest, self._uri(digest))

    def path(self, ref: Ref) -> Path:
        """The object's file, read-only and never changed; StoreError, code "missing", if it is absent."""
        self._size(ref)
        return self._objects.path(ref.digest)

    def read_bytes(self, ref: Ref) -> bytes:
        """The object's bytes; StoreError, code "missing" or "damaged", unless they hash to the digest."""
        return self._objects.read(ref.digest)

    def load_bundle(self, ref: Ref) -> ModelBundle:
        """The bundle, checked against the digest; StoreError, code "wrong-kind", for any other kind."""
        if ref.kind != "bundle":
            raise StoreError("wrong-kind", f"object {ref.digest} is of kind {ref.kind!r}, not a bundle")
        self.check(ref)
        return ModelBundle.load(self.path(ref))

    def check(self, ref: Ref) -> None:
        """Raise StoreError, code "missing" or "damaged", unless the object exists and hashes to its name."""
        self._objects.check(ref.digest)

    def digests(self, prefix: str = "") -> list[str]:
        """Digests of all objects that begin with `prefix`, hex digits."""
        return sorted(self._objects.digests(prefix))

    def recall(self, key: str) -> StepRecord | None:
        """The record of the step with this key, or None if there is none, or it is damaged.

        The objects it names are not checked.
        """
        stage = self._read_record(f"steps/{_checked_key(key)}")
        return stage.record if stage and stage.key == key else None

    def remember(self, key: str, record: StepRecord) -> StepRecord:
        """Keep a step's record, all of whose objects must be in the store; returns the record that stands.

        The first record of a key stands, unless it or one of its objects is missing or damaged.
        """
        name, data = f"steps/{_checked_key(key)}", encode_record(key, record, self._size)
        if self._references.create(name, data):
            return record
        standing = self.recall(key)
        if standing and all(self._is_intact(ref) for ref in standing.results.values()):
            return standing
        self._references.replace(name, data)
        return record

    def steps(self) -> dict[str, StepRecord]:
        """All step records by key."""
        records = {key: self.recall(key) for key in self._references.names("steps") if is_digest(key)}
        return {key: record for key, record in records.items() if record}

    def name_run(self, run: str, stage: str, key: str, record: StepRecord) -> None:
        """Let `run/stage` mean this step from now on, whatever it meant before."""
        require_name("run", run)
        require_name("stage", stage)
        self._references.replace(f"runs/{run}/{stage}", encode_record(_checked_key(key), record, self._size))

    def run_stages(self, run: str) -> dict[str, RunStage]:
        """Key and record of each stage of a run, in alphabetical order; empty for an unknown run."""
        require_name("run", run)
        stages = {
            name: self._read_record(f"runs/{run}/{name}") for name in self._references.names(f"runs/{run}")
        }
        return {name: stage for name, stage in stages.items() if stage}

    def runs(self) -> list[str]:
        """Names of all runs, sorted."""
        return [name for name in self._references.names("runs") if is_name(name)]

    def artifacts(self) -> dict[str, Ref]:
        """References to all bundles by artifact id."""
        refs = {name: self._read_ref(f"artifacts/{name}") for name in self._references.names("artifacts")}
        return {name: ref for name, ref in refs.items() if ref}

    def resolve(self, text: str) -> Ref:
        """The object meant by `run/stage`, `run/stage/result`, an artifact id or a digest.

        A stage means its bundle, else its first result; `runs/` may come first; 6 digits of an id are enough.
        Raises StoreError: "unknown", with near matches in the message, or "ambiguous".
        """
        return resolve(self, text)

    def _read_ref(self, name: str) -> Ref | None:
        data = self._references.read(name)
        try:
            return decode_ref(data, self._uri) if data else None
        except (ValueError, TypeError, KeyError):
            return None  # damaged; putting the bundle again repairs it

    def _read_record(self, name: str) -> RunStage | None:
        data = self._references.read(name)
        try:
            return decode_record(data, self._uri) if data else None
        except (ValueError, TypeError, KeyError):
            return None  # damaged; running the step again repairs it

    def _is_intact(self, ref: Ref) -> bool:
        try:
            self.check(ref)
        except StoreError as error:
            if error.code not in ("missing", "damaged"):
                raise
            return False
        return True

    def _size(self, ref: Ref) -> int:
        return self._objects.size(ref.digest)

    def _uri(self, digest: str) -> str:
        return self._objects.path(digest).as_uri()


def _checked_key(key: str) -> str:
    if not is_digest(key):
        raise ValueError(f"a step key is 64 lower-case hex digits, got {key!r}")
    return key
