"""What the store says about its objects: typed references, step records, names of runs, tags.

Each is one small file of sealed canonical JSON: its member `sha256` covers all the others, so that no changed
byte goes unnoticed. Objects are named by kind, digest and size, never by path, so that a store can be moved.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from artifacts.bundle_manifest import is_digest
from artifacts.canonical_json import canonical_json, parse_json
from artifacts.errors import ArtifactError, StoreError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

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
    previous: str | None
    """The digest before the last move."""


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


def decode_record(data: bytes, uri_of: UriOf) -> tuple[str, StepRecord]:
    """Key and record that `encode_record` wrote; StoreError, code "damaged-reference", for other bytes."""
    return _decoded(data, lambda content: (content["key"], _record(content, uri_of)))


def encode_stage(stage: RunStage, size_of: Callable[[Ref], int]) -> bytes:
    """A sealed name of a run's stage."""
    return seal(_record_json(stage.key, stage.record, size_of) | {"previous": stage.previous})


def decode_stage(data: bytes, uri_of: UriOf) -> RunStage:
    """The stage that `encode_stage` wrote; StoreError, code "damaged-reference", for other bytes."""
    return _decoded(
        data, lambda content: RunStage(content["key"], _record(content, uri_of), content["previous"])
    )


def encode_tag(tag: Tag, size_of: Callable[[Ref], int]) -> bytes:
    """A sealed tag."""
    target = _ref_json(tag.ref, size_of(tag.ref)) if tag.ref else {"digest": None}
    return seal(target | {"prev": tag.previous, "seq": tag.sequence})


def decode_tag(data: bytes, uri_of: UriOf) -> Tag:
    """The tag that `encode_tag` wrote; StoreError, code "damaged-reference", for other bytes."""
    return _decoded(
        data,
        lambda content: Tag(
            _ref(content, uri_of) if content["digest"] is not None else None, content["seq"], content["prev"]
        ),
    )


def moves_forward(name: str, old: Tag | None, new: Tag) -> bool:
    """Whether a copy of a tag that is at `old` should move on to `new`; False if it is there or further.

    Raises StoreError, code "tag-diverged", if the two moved apart.
    """
    if old is None or old == new or new.sequence < old.sequence:
        return old is None
    digest = old.ref.digest if old.ref else None
    if new.sequence == old.sequence or (new.sequence == old.sequence + 1 and new.previous != digest):
        there = new.ref.digest if new.ref else "nothing"
        message = (
            f"tag {name} means {digest or 'nothing'} in one store and {there} in the other: set it in one"
        )
        raise StoreError("tag-diverged", f"{message} of them to what it should mean, once more than there")
    return True


def reference_objects(name: str, data: bytes) -> dict[str, int | None]:
    """Digests and sizes of the objects that the reference of this name keeps; inputs are of unknown size.

    Raises StoreError: "damaged-reference" for bytes that were not written as this reference, "bad-name".
    """
    folder, *rest = name.split("/")
    content = unseal(data)
    try:
        sizes: dict[str, int | None] = {}
        named = [content] if content.get("digest", "") is not None else []
        if folder in ("steps", "runs"):
            sizes |= {ref.digest: None for ref in _record(content, str).inputs().values()}
            named = content["results"]
        for item in named:
            if type(item["size"]) is not int or item["size"] < 0:
                raise ValueError(f"an object cannot have {item['size']!r} bytes")
            sizes[_ref(item, str).digest] = item["size"]
        if folder == "steps" and content["key"] != rest[0]:
            raise ValueError(f"holds the record of {content['key']}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError("damaged-reference", f"reference {name}: {error!r}") from error
    return sizes


def require_reference_name(name: str) -> None:
    """Raise StoreError, code "bad-name", unless a store can hold a reference of this name."""
    folder, *rest = name.split("/")
    depth = {"artifacts": 1, "steps": 1, "runs": 2, "tags": 1}.get(folder)
    by_digest = folder in ("artifacts", "steps")
    if len(rest) != depth or not all(is_digest(part) if by_digest else is_name(part) for part in rest):
        raise StoreError("bad-name", f"no reference can be called {name!r}")


def _decoded(data: bytes, read: Callable[[dict[str, Any]], Any]) -> Any:
    content = unseal(data)
    try:
        return read(content)
    except (ArtifactError, ValueError, TypeError, KeyError) as error:
        raise StoreError("damaged-reference", f"a reference of another kind: {error!r}") from error


def _inputs(value: Any, place: str) -> Iterator[tuple[str, Ref]]:
    if isinstance(value, dict) and value.keys() == {"kind", "digest"} and is_digest(value["digest"]):
        yield place, Ref(value["kind"], value["digest"])
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield from _inputs(item, f"{place}.{name}" if place else str(name))


def _record_json(key: str, record: StepRecord, size_of: Callable[[Ref], int]) -> dict[str, Any]:
    results = []
    for name, ref in record.results.items():
        require_name("result name", name)
        results.append({"name": name, **_ref_json(ref, size_of(ref))})
    return {
        "key": key,
        "step": record.step,
        "version": record.version,
        "recipe": record.recipe,
        "results": results,
        "seconds": record.seconds,
    }


def _record(content: dict[str, Any], uri_of: UriOf) -> StepRecord:
    results = {item["name"]: _ref(item, uri_of) for item in content["results"]}
    return StepRecord(content["step"], content["version"], content["recipe"], results, content["seconds"])


def _ref_json(ref: Ref, size: int) -> dict[str, Any]:
    return {"kind": ref.kind, "digest": ref.digest, "size": size}


def _ref(content: dict[str, Any], uri_of: UriOf) -> Ref:
    return Ref(content["kind"], content["digest"], uri_of(content["digest"]))
