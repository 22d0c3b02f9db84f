"""From what a person types to an object: a tag, `run/stage`, `run/stage/result`, or first digits of an id."""

import difflib
import string
from collections.abc import Iterator
from typing import TYPE_CHECKING

from artifacts.errors import StoreError
from artifacts.records import Ref, RunStage

if TYPE_CHECKING:
    from artifacts.store import Store

_SHORTEST_PREFIX = 6


def resolve(store: "Store", text: str) -> Ref:
    """The reference that `text` means; see `Store.resolve`."""
    tag = store.tags().get(text.removeprefix("tags/"))
    if tag:
        return tag
    for name in (text, text.removeprefix("runs/")):
        ref = _by_name(store, name.split("/"))
        if ref:
            return ref
    if not set(text) <= set(string.hexdigits) or len(text) < _SHORTEST_PREFIX:
        raise _unknown(store, text)
    return _by_digits(store, text.lower())


def _by_name(store: "Store", parts: list[str]) -> Ref | None:
    if len(parts) not in (2, 3) or parts[0] not in store.runs():
        return None
    stage = store.run_stages(parts[0]).get(parts[1])
    if stage is None:
        return None
    return stage.record.results.get(parts[2]) if len(parts) == 3 else _main_result(stage)


def _main_result(stage: RunStage) -> Ref | None:
    results = list(stage.record.results.values())
    return next((ref for ref in results if ref.kind == "bundle"), results[0] if results else None)


def _by_digits(store: "Store", prefix: str) -> Ref:
    artifacts = {name: ref for name, ref in store.artifacts().items() if name.startswith(prefix)}
    found = {ref.digest: f"artifact {name}" for name, ref in artifacts.items()}
    found |= {digest: f"object {digest}" for digest in store.digests(prefix)}
    if not found:
        raise _unknown(store, prefix)
    if len(found) > 1:
        candidates = ", ".join(sorted(found.values())[:5])
        raise StoreError("ambiguous", f"{prefix} begins {len(found)} ids: give more digits ({candidates})")
    return _known_ref(store, next(iter(found)))


def _known_ref(store: "Store", digest: str) -> Ref:
    """A reference with the kind that an artifact, tag or step gives the object; else of kind "object"."""
    refs = [*store.artifacts().values(), *store.tags().values()]
    for record in store.steps().values():
        refs += [*record.results.values(), *record.inputs().values()]
    return next((ref for ref in refs if ref.digest == digest), store.ref("object", digest))


def _unknown(store: "Store", text: str) -> StoreError:
    near = _near_names(store, text.removeprefix("runs/")) + _near_digits(store, text)
    hint = f"did you mean {' or '.join(near)}?" if near else f"runs here: {', '.join(store.runs()) or 'none'}"
    return StoreError("unknown", f"nothing in the store {store.root} is called {text!r}; {hint}")


def _near_names(store: "Store", text: str) -> list[str]:
    names = list(_names(store))
    inside = [name for name in names if name.startswith(f"{text}/")]
    return inside[:5] or difflib.get_close_matches(text, names, n=3)


def _near_digits(store: "Store", text: str) -> list[str]:
    length = len(text)
    if length < _SHORTEST_PREFIX or not set(text) <= set(string.hexdigits):
        return []
    ids = {name[:length]: name for name in [*store.artifacts(), *store.digests()]}
    return [ids[match] for match in difflib.get_close_matches(text, list(ids), n=2, cutoff=0.8)]


def _names(store: "Store") -> Iterator[str]:
    yield from store.tags()
    for run in store.runs():
        for name, stage in store.run_stages(run).items():
            yield f"{run}/{name}"
            yield from (f"{run}/{name}/{result}" for result in stage.record.results)
