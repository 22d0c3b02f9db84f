"""What the store says about its objects: typed references, step records, names of runs, tags.

Each is one small file of sealed canonical JSON: its member `sha256` covers all the others, so that no changed
byte goes unnoticed. Objects are named by kind, digest and size, never by path, so that a store can be moved.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from artifacts.bundle_manifest import is_digest
from artifacts.canonical_json import canonical_json, parse_json
from artifacts.checks import require_integer, require_keys
from artifacts.errors import ArtifactError, StoreError
from artifacts.step_key import step_key

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
REFERENCE_FOLDERS = ("artifacts", "steps", "runs", "tags")
"""The folders of references, in the order in which they can be written."""
_REF_KEYS = {"kind", "digest", "size"}
_RECORD_KEYS = {"key", "step", "version", "recipe", "results", "seconds"}
_REMEMBERED_MOVES = 64

UriOf = Callable[[str], str]
"""Where an object of this digest lies."""


def is_name(value: Any) -> bool:
    """Whether the value is a text that can stand in any path and in `run/stage/result`."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def require_name(what: str, name: Any) -> None:
    """Raise StoreError, code "bad-name", unless `is_name`; `what` says what is named."""
    if not is_name(name):
        message = f"{what} must be letters, digits, '.', '_' or '-', at most 128, not first '.', got {name!r}"
        raise StoreError("bad-name", message)


@dataclass(frozen=True, slots=True)
class Ref:
    """A typed reference to an object. `uri` says where it is now and is not part of its identity."""

    kind: str
    digest: str
    uri: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError for a kind that is no name or a digest that is not 64 lower-case hex digits."""
        require_name("kind", self.kind)
        if not is_digest(self.digest):
            raise ValueError(f"digest must be 64 lower-case hex digits, got {self.digest!r}")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step did: the recipe its key was made from, its results by name, the seconds it took."""

    step: str
    version: int
    recipe: dict[str, Any]
    results: dict[str, Ref]
    seconds: float

    def inputs(self) -> dict[str, Ref]:
        """The objects the recipe names, by their place in it: `corpus`, `bases.0`."""
        return dict(_inputs(self.recipe, ""))


@dataclass(frozen=True, slots=True)
class RunStage:
    """What a stage of a run is a name for: a step's key and its record."""

    key: str
    record: StepRecord
    previous: str | None = None
    """The key it was a name for before, if that was another."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A name that moves by compare-and-swap. A removed one stays, without an object, to go on counting."""

    ref: Ref | None
    sequence: int
    """1 for a new tag, and one more with each move."""
    history: tuple[str | None, ...] = ()
    """The digests before the last 64 moves, newest first; None where it meant nothing."""

    @property
    def digest(self) -> str | None:
        """The digest it means."""
        return self.ref.digest if self.ref else None

    @property
    def previous(self) -> str | None:
        """The digest before the last move."""
        return self.history[0] if self.history else None

    def moved(self, ref: Ref | None, sequence: int) -> Self:
        """The tag after it has moved on to mean `ref`, so far that this is its move number `sequence`."""
        moves = min(sequence - self.sequence, _REMEMBERED_MOVES)
        history = (self.digest,) * moves + self.history
        return type(self)(ref, sequence, history[:_REMEMBERED_MOVES])


def seal(content: dict[str, Any]) -> bytes:
    """Canonical JSON of the content and of its own SHA-256."""
    return canonical_json(content | {"sha256": hashlib.sha256(canonical_json(content)).hexdigest()})


def unseal(data: bytes) -> dict[str, Any]:
    """The content that `seal` wrote; StoreError, code "damaged-reference", for any other bytes."""
    try:
        content = parse_json(data, what="reference")
        seal_of_content = content.pop("sha256", None) if isinstance(content, dict) else None
        if seal_of_content is None or seal(content) != data:
            raise ValueError("its content does not have the SHA-256 it claims")
    except ValueError as error:
        raise StoreError("damaged-reference", f"not a reference as it was written: {error}") from error
    return content


def encode_ref(ref: Ref, size: int) -> bytes:
    """A sealed reference to an object of `size` bytes."""
    return seal(_ref_json(ref, size))


def decode_ref(data: bytes, uri_of: UriOf) -> Ref:
    """The reference that `encode_ref` wrote; StoreError, code "damaged-reference", for other bytes."""
    return _decoded(data, lambda content: _ref(content, uri_of))


def encode_record(key: str, record: StepRecord, size_of: Callable[[Ref], int]) -> bytes:
    """A sealed step record; results keep their order."""
    return seal(_record_json(key, record, size_of))


def decode_record(key: str, data: bytes, uri_of: UriOf) -> StepRecord:
    """The record that `encode_record` wrote for this key, which must be that of its recipe.

    StoreError, code "damaged-reference", for other bytes.
    """

    def read(content: dict[str, Any]) -> StepRecord:
        record = _record(content, uri_of)
        made = step_key(record.step, record.version, record.recipe)
        if not content["key"] == key == made:
            raise ValueError(f"says that its key is {content['key']}, its recipe has {made}")
        return record

    return _decoded(data, read)


def encode_stage(stage: RunStage, size_of: Callable[[Ref], int]) -> bytes:
    """A sealed name of a run's stage."""
    return seal(_record_json(stage.key, stage.record, size_of) | {"previous": stage.previous})


def decode_stage(data: bytes, uri_of: UriOf) -> RunStage:
    """The stage that `encode_stage` wrote; StoreError, code "damaged-reference", for other bytes."""

    def read(content: dict[str, Any]) -> RunStage:
        previous = content.pop("previous")
        if previous is not None and not is_digest(previous):
            raise ValueError(f"previous must be a step key or null, got {previous!r}")
        return RunStage(content["key"], _record(content, uri_of), previous)

    return _decoded(data, read)


def encode_tag(tag: Tag, size_of: Callable[[Ref], int]) -> bytes:
    """A sealed tag."""
    target = _ref_json(tag.ref, size_of(tag.ref)) if tag.ref else {"digest": None}
    return seal(target | {"history": list(tag.history), "seq": tag.sequence})


def decode_tag(data: bytes, uri_of: UriOf) -> Tag:
    """The tag that `encode_tag` wrote; StoreError, code "damaged-reference", for other bytes."""

    def read(content: dict[str, Any]) -> Tag:
        history, sequence = content.pop("history"), content.pop("seq")
        require_integer("seq", sequence, 1, None)
        if not (isinstance(history, list) and all(digest is None or is_digest(digest) for digest in history)):
            raise ValueError(f"history must be a list of digests and nulls, got {history!r}")
        if len(history) != min(sequence - 1, _REMEMBERED_MOVES):
            raise ValueError(f"history has {len(history)} moves of {sequence - 1}")
        ref = None if content == {"digest": None} else _ref(content, uri_of)
        return Tag(ref, sequence, tuple(history))

    return _decoded(data, read)


def moves_forward(name: str, old: Tag | None, new: Tag) -> bool:
    """Whether a copy of a tag that is at `old` should move on to `new`; False if it is there or further.

    Raises StoreError, code "tag-diverged", unless one of them has been where the other is, as far as their
    histories tell.
    """
    if old is None or (old.digest, old.sequence) == (new.digest, new.sequence):
        return old is None
    earlier, later = (old, new) if old.sequence < new.sequence else (new, old)
    moves = later.sequence - earlier.sequence
    if moves == 0 or later.history[moves - 1 : moves] != (earlier.digest,):
        meanings = f"{old.digest or 'nothing'} in one store and {new.digest or 'nothing'} in the other"
        remedy = "copy it with --force to let the store it is copied from decide"
        raise StoreError("tag-diverged", f"tag {name} was moved in two places and means {meanings}: {remedy}")
    return later is new


def reference_objects(name: str, data: bytes) -> dict[str, int | None]:
    """Digests and sizes of the objects that the reference of this name keeps; inputs are of unknown size.

    Raises StoreError: "damaged-reference" for bytes that were not written as this reference, "bad-name".
    """
    require_reference_name(name)
    folder, *rest = name.split("/")
    sizes: dict[str, int | None] = {}
    try:
        if folder == "artifacts":
            decode_ref(data, str)
        elif folder == "tags":
            decode_tag(data, str)
        else:
            stage = folder == "runs"
            record = decode_stage(data, str).record if stage else decode_record(rest[0], data, str)
            sizes |= {ref.digest: None for ref in record.inputs().values()}
    except StoreError as error:
        raise damaged_reference(name, error) from error
    content = unseal(data)
    named = content.get("results", [content] if content.get("digest") else [])
    return sizes | {item["digest"]: item["size"] for item in named}


def damaged_reference(name: str, error: StoreError) -> StoreError:
    """What reading a damaged reference of a store raises."""
    is_tag = name.startswith("tags/")
    remedy = "set the tag again (`riftco store tag TAG NAME --force`)" if is_tag else "run its step again"
    message = f"reference {name} is damaged, {error}: {remedy}, push it again from elsewhere, or delete its"
    return StoreError("damaged-reference", f"{message} file refs/{name}")


def reference_order(name: str) -> tuple[int, list[str]]:
    """Sorts names of references as they can be written: artifacts, steps, runs, then tags."""
    folder, *rest = name.split("/")
    return REFERENCE_FOLDERS.index(folder), rest


def is_reference_name(name: str) -> bool:
    """Whether a store can hold a reference of this name."""
    folder, *rest = name.split("/")
    depth = {"artifacts": 1, "steps": 1, "runs": 2, "tags": 1}.get(folder)
    by_digest = folder in ("artifacts", "steps")
    return len(rest) == depth and all(is_digest(part) if by_digest else is_name(part) for part in rest)


def require_reference_name(name: str) -> None:
    """Raise StoreError, code "bad-name", unless `is_reference_name`."""
    if not is_reference_name(name):
        raise StoreError("bad-name", f"no reference can be called {name!r}: rename or delete its file")


def _decoded(data: bytes, read: Callable[[dict[str, Any]], Any]) -> Any:
    content = unseal(data)
    try:
        return read(content)
    except (ArtifactError, ValueError, TypeError, KeyError) as error:
        raise StoreError("damaged-reference", f"not a reference of its kind: {error}") from error


def _inputs(value: Any, place: str) -> Iterator[tuple[str, Ref]]:
    if isinstance(value, dict) and value.keys() == {"kind", "digest"} and is_digest(value["digest"]):
        yield place, Ref(value["kind"], value["digest"])
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield from _inputs(item, f"{place}.{name}" if place else str(name))


def _record_json(key: str, record: StepRecord, size_of: Callable[[Ref], int]) -> dict[str, Any]:
    content = {
        "key": key,
        "step": record.step,
        "version": record.version,
        "recipe": record.recipe,
        "results": [{"name": name, **_ref_json(ref, size_of(ref))} for name, ref in record.results.items()],
        "seconds": record.seconds,
    }
    _record(content, str)  # nothing is written that would not be read
    return content


def _record(content: dict[str, Any], uri_of: UriOf) -> StepRecord:
    require_keys("a step record", content, _RECORD_KEYS)
    results, seconds, recipe = content["results"], content["seconds"], content["recipe"]
    if not is_digest(content["key"]):
        raise ValueError(f"key must be 64 lower-case hex digits, got {content['key']!r}")
    require_integer("version", content["version"], 0, None)
    if not (isinstance(content["step"], str) and isinstance(recipe, dict) and isinstance(results, list)):
        raise TypeError("step must be a text, recipe an object and results a list")
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        raise ValueError(f"seconds must be a number from 0, got {seconds!r}")
    named: dict[str, Ref] = {}
    for item in results:
        require_keys("a result", item, _REF_KEYS | {"name"})
        require_name("result name", item["name"])
        if item["name"] in named:
            raise ValueError(f"result {item['name']} occurs twice")
        named[item["name"]] = _ref({key: item[key] for key in _REF_KEYS}, uri_of)
    return StepRecord(content["step"], content["version"], recipe, named, seconds)


def _ref_json(ref: Ref, size: int) -> dict[str, Any]:
    return {"kind": ref.kind, "digest": ref.digest, "size": size}


def _ref(content: dict[str, Any], uri_of: UriOf) -> Ref:
    require_keys("a reference", content, _REF_KEYS)
    require_integer("size", content["size"], 0, None)
    ref = Ref(content["kind"], content["digest"])
    return Ref(ref.kind, ref.digest, uri_of(ref.digest))
