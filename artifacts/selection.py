"""Which references belong to some names, and which objects to references."""

from collections.abc import Mapping, Sequence

from artifacts.errors import StoreError
from artifacts.lookup import ambiguous, is_prefix, places
from artifacts.records import reference_objects


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
    """Names of the references that runs, stages, tags and ids reach, in the order given.

    With them come the steps and artifacts behind them and all they were made from; without `names`,
    everything. Raises StoreError: "unknown", which says that nothing in `where` is called so, "ambiguous",
    and "damaged-reference" for a chosen reference, or a step or artifact that may belong to one.
    """
    objects = {
        name: reference_objects(name, data)
        for name, data in references.items()
        if not names or name.startswith(("artifacts/", "steps/"))
    }
    if not names:
        return list(objects)
    owners = _owners(objects)
    chosen = {found for name in names for found in _called(references, owners, name, where)}
    waiting = sorted(chosen)
    for name in waiting:  # grows while we walk
        for digest in objects.get(name) or reference_objects(name, references[name]):
            found = owners.get(digest, set()) - chosen
            chosen |= found
            waiting += sorted(found)
    return [name for name in references if name in chosen]


def _owners(objects: Mapping[str, dict[str, int | None]]) -> dict[str, set[str]]:
    """Digest -> the artifacts of this object and the steps that made it; inputs have no size."""
    owners: dict[str, set[str]] = {}
    for name, sizes in objects.items():
        for digest, size in sizes.items():
            if size is not None:
                owners.setdefault(digest, set()).add(name)
    return owners


def _called(
    references: Mapping[str, bytes], owners: Mapping[str, set[str]], text: str, where: str
) -> set[str]:
    spoken = places(references, text)
    if spoken and spoken[0].startswith("tags/") and not reference_objects(spoken[0], references[spoken[0]]):
        spoken += places(references.keys() - spoken, text)  # a removed tag goes along with what it hides
    found = {"/".join(place.split("/")[:3]) for place in spoken}  # a result's stage
    if not found and is_prefix(text):
        digits = text.lower()
        ids = {name for names in owners.values() for name in names if name.startswith(f"artifacts/{digits}")}
        digests = {digest for digest in owners if digest.startswith(digits) or owners[digest] & ids}
        if len(digests) > 1:
            raise ambiguous(digits, digests)
        found = {name for digest in digests for name in owners[digest]}
    if not found:
        runs = sorted({name.split("/")[1] for name in references if name.startswith("runs/")})
        raise StoreError(
            "unknown", f"nothing in {where} is called {text!r}; runs there: {', '.join(runs) or 'none'}"
        )
    return found
