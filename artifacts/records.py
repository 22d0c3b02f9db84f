"""What the store says about its objects: typed references, and records of the steps that made them.

Records name objects by kind, digest and size and never by path, so that a store can be moved or copied.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from artifacts.bundle_manifest import is_digest
from artifacts.canonical_json import canonical_json, parse_json
from artifacts.errors import StoreError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


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


class RunStage(NamedTuple):
    """What a stage of a run is a name for: a step's key and its record."""

    key: str
    record: StepRecord


def encode_record(key: str, record: StepRecord, size_of: Callable[[Ref], int]) -> bytes:
    """Canonical JSON of a key and its record; results keep their order."""
    results = []
    for name, ref in record.results.items():
        require_name("result name", name)
        results.append({"name": name, **_ref_json(ref, size_of(ref))})
    return canonical_json(
        {
            "key": key,
            "step": record.step,
            "version": record.version,
            "recipe": record.recipe,
            "results": results,
            "seconds": record.seconds,
        }
    )


def decode_record(data: bytes, uri_of: Callable[[str], str]) -> RunStage:
    """The key and record that `encode_record` wrote; ValueError, TypeError or KeyError for other bytes."""
    value = parse_json(data, what="step record")
    results = {item["name"]: _ref(item, uri_of) for item in value["results"]}
    record = StepRecord(value["step"], value["version"], value["recipe"], results, value["seconds"])
    return RunStage(value["key"], record)


def encode_ref(ref: Ref, size: int) -> bytes:
    """Canonical JSON of a reference and its object's size in bytes."""
    return canonical_json(_ref_json(ref, size))


def decode_ref(data: bytes, uri_of: Callable[[str], str]) -> Ref:
    """The reference that `encode_ref` wrote; ValueError, TypeError or KeyError for other bytes."""
    return _ref(parse_json(data, what="reference"), uri_of)


def _ref_json(ref: Ref, size: int) -> dict[str, Any]:
    return {"kind": ref.kind, "digest": ref.digest, "size": size}


def _ref(value: dict[str, Any], uri_of: Callable[[str], str]) -> Ref:
    return Ref(value["kind"], value["digest"], uri_of(value["digest"]))
