"""Which references belong to some names, and which objects to references."""

import string
from collections.abc import Iterable, Mapping, Sequence

from artifacts.errors import StoreError
from artifacts.records import reference_objects

_SHORTEST_PREFIX = 6


def is_readable(name: str, data: bytes) -> bool:
    """Whether `reference_objects` can read the reference."""
    try:
        reference_objects(name, data)
    except StoreError:
        return False
    return True


def all_objects(references: Mapping[str, bytes]) -> dict[str, int | None]:
    """Digests and sizes of all objects that references name; None for a size that none of them says.

    Raises StoreError: "damaged-reference", and "damaged" if two references disagree.
    """
    sizes: dict[str, int | None] = {}
    for name, data in references.items():
        for digest, size in reference_objects(name, data).items():
            known = sizes.get(digest)
            if known is not None and size not in (None, known):
                message = f"{name} says that object {digest} has {size} bytes, another reference {known}"
                raise StoreError("damaged", f"{message}: run again the step that is wrong")
            sizes[digest] = known if size is None else size
    return sizes


def reachable(references: Mapping[str, bytes], names: Sequence[str], where: str) -> list[str]:
    """Names of the references that runs, `run/stage`s, tags and artifact ids reach, in the order given.

    With them come the steps and artifacts behind them and all they were made from; without `names`,
    everything. Raises StoreError, code "unknown", which says that nothing in `where` is called so, or
    "ambiguous".
    """
    if not names:
        return list(references)
    # a damaged reference leads nowhere, and whoever transfers it says so
    objects = {
        n: reference_objects(n, data) if is_readable(n, data) else {} for n, data in references.items()
    }
    owners = _owners(objects)
    chosen = {found for name in names for found in _called(references, name, where)}
    waiting = list(chosen)
    for name in waiting:  # grows while we walk
        for digest in objects[name]:
            found = owners.get(digest, set()) - chosen
            chosen |= found
            waiting += sorted(found)
    return [name for name in references if name in chosen]


def _owners(objects: Mapping[str, dict[str, int | None]]) -> dict[str, set[str]]:
    """Digest -> the artifacts of this object and the steps that made it; inputs have no size."""
    owners: dict[str, set[str]] = {}
    for name, sizes in objects.items():
        if name.startswith(("artifacts/", "steps/")):
            for digest, size in sizes.items():
                if size is not None:
                    owners.setdefault(digest, set()).add(name)
    return owners


def _called(references: Iterable[str], text: str, where: str) -> list[str]:
    text = text.removeprefix("runs/")
    exact = {f"tags/{text.removeprefix('tags/')}", f"runs/{text}", f"artifacts/{text}"}
    found = [name for name in references if name in exact or name.startswith(f"runs/{text}/")]
    if not found and len(text) >= _SHORTEST_PREFIX and set(text) <= set(string.hexdigits):
        found = [name for name in references if name.startswith(f"artifacts/{text.lower()}")]
        if len(found) > 1:
            raise StoreError(
                "ambiguous", f"{text} begins {len(found)} artifact ids in {where}: give more digits"
            )
    if not found:
        runs = sorted({name.split("/")[1] for name in references if name.startswith("runs/")})
        raise StoreError(
            "unknown", f"nothing in {where} is called {text!r}; runs there: {', '.join(runs) or 'none'}"
        )
    return found
