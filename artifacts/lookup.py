"""From what a person types to what is meant: a tag, a run, `run/stage`, `run/stage/result`, digits of an id.

One order for every command: a tag goes before a run of the same name, names go before digits, and what is in
quarantine comes last, so that it can be named again.
"""

import difflib
import string
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from artifacts.errors import StoreError
from artifacts.records import Ref

if TYPE_CHECKING:
    from artifacts.store import Store

_SHORTEST_PREFIX = 6


def places(names: Collection[str], text: str) -> list[str]:
    """What `text` is a name for among references of these names; empty if nothing is called so.

    A tag is `tags/best`, a stage `runs/demo/train`, its result `runs/demo/train/model` (whether there is one
    is not looked at), and a run is all its stages.
    """
    tag = f"tags/{text.removeprefix('tags/')}"
    if tag in names:
        return [tag]
    for bare in (text, text.removeprefix("runs/")):
        if "runs/" + "/".join(bare.split("/")[:2]) in names:
            return [f"runs/{bare}"]
        stages = [name for name in names if name.startswith(f"runs/{bare}/")]
        if stages:
            return stages
    return []


def _places(store: "Store", text: str) -> list[str]:
    """As `places` among the names of a store, but for a tag that was removed and means nothing."""
    names = set(store.spoken_names())
    found = places(names, text)
    if found and found[0].startswith("tags/"):
        tag = store.tag(found[0].removeprefix("tags/"))
        if not (tag and tag.ref):
            return places(names - {found[0]}, text)
    return found


def is_prefix(text: str) -> bool:
    """Whether the text is long enough a beginning of an id, and may have upper-case digits."""
    return len(text) >= _SHORTEST_PREFIX and set(text) <= set(string.hexdigits)


def resolve(store: "Store", text: str) -> Ref:
    """The reference that `text` means; see `Store.resolve`."""
    found = _places(store, text)
    if found and not _is_run(found, text):
        refs = _objects(store, found[0])
        if refs:
            return refs[0]
    if not is_prefix(text):
        raise _unknown(store, text)
    return _by_digits(store, text.lower())


def run_called(store: "Store", text: str) -> str | None:
    """The run that `text` means, if it means a run."""
    found = _places(store, text)
    return found[0].split("/")[1] if _is_run(found, text) else None


def _is_run(found: list[str], text: str) -> bool:
    return bool(found) and found[0] not in (text, f"tags/{text}", f"runs/{text}")


def objects(store: "Store", text: str) -> list[Ref]:
    """All objects that `text` means: those of every stage of a run, every result of a stage, else one.

    Raises StoreError as `Store.resolve` does, "damaged-reference" for a stage or tag that cannot be read.
    """
    found = [ref for place in _places(store, text) for ref in _objects(store, place)]
    return found or [resolve(store, text)]


def _objects(store: "Store", place: str) -> list[Ref]:
    """The objects at a place, the main one first: a stage's bundle, else its first result."""
    folder, name, *rest = place.split("/", 3)
    if folder == "tags":
        tag = store.tag(name)
        return [tag.ref] if tag and tag.ref else []
    stage = store.stage(name, rest[0])
    results = stage.record.results if stage else {}
    if len(rest) == 2:
        return [results[rest[1]]] if rest[1] in results else []
    return sorted(results.values(), key=lambda ref: ref.kind != "bundle")


def _by_digits(store: "Store", prefix: str) -> Ref:
    artifacts = {name: ref for name, ref in store.artifacts().items() if name.startswith(prefix)}
    found = {ref.digest: f"artifact {name}" for name, ref in artifacts.items()}
    found |= {digest: f"object {digest}" for digest in store.digests(prefix)}
    found = found or {digest: f"object {digest}" for digest in store.objects.in_quarantine(prefix)}
    if not found:
        raise _unknown(store, prefix)
    if len(found) > 1:
        raise ambiguous(prefix, found.values())
    return _known_ref(store, next(iter(found)))


def ambiguous(prefix: str, found: Collection[str]) -> StoreError:
    """What looking up the beginning of several ids raises."""
    candidates = ", ".join(sorted(found)[:5])
    return StoreError("ambiguous", f"{prefix} begins {len(found)} ids: give more digits ({candidates})")


def _known_ref(store: "Store", digest: str) -> Ref:
    """A reference with the kind that an artifact, tag or step gives the object; else of kind "object"."""
    refs = [*store.artifacts().values(), *store.tags().values()]
    for record in store.steps().values():
        refs += [*record.results.values(), *record.inputs().values()]
    return next((ref for ref in refs if ref.digest == digest), store.ref("object", digest))


def _unknown(store: "Store", text: str) -> StoreError:
    if run := run_called(store, text):
        stages = ", ".join(f"{run}/{stage}" for stage in store.run_stages(run))
        return StoreError("unknown", f"{run} is a run; name one of its stages: {stages}")
    near = _near_names(store, text.removeprefix("runs/")) + _near_digits(store, text)
    hint = f"did you mean {' or '.join(near)}?" if near else f"runs here: {', '.join(store.runs()) or 'none'}"
    return StoreError("unknown", f"nothing in the store {store.root} is called {text!r}; {hint}")


def _near_names(store: "Store", text: str) -> list[str]:
    names = list(_names(store))
    inside = [name for name in names if name.startswith(f"{text}/")]
    return inside[:5] or difflib.get_close_matches(text, names, n=3)


def _near_digits(store: "Store", text: str) -> list[str]:
    if not is_prefix(text):
        return []
    ids = {name[: len(text)]: name for name in [*store.artifacts(), *store.digests()]}
    return [ids[match] for match in difflib.get_close_matches(text, list(ids), n=2, cutoff=0.8)]


def _names(store: "Store") -> Iterator[str]:
    yield from store.tags()
    for run in store.runs():
        for name, stage in store.run_stages(run).items():
            yield f"{run}/{name}"
            yield from (f"{run}/{name}/{result}" for result in stage.record.results)
