"""Which references belong to some names, and which objects to references."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from artifacts.errors import StoreError
from artifacts.lookup import ambiguous, is_prefix, places
from artifacts.records import decode_stage, reference_objects


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


def selected(
    list_names: Callable[[], Sequence[str]],
    read: Callable[[str], bytes | None],
    names: Sequence[str],
    where: str,
) -> dict[str, bytes]:
    """The references that `reachable` chooses, with their bytes, of a store that others may be writing to.

    Runs and tags are read before artifacts and steps are listed. These are written before the names, so what
    a name was made from is listed too, whenever it has come to mean that. Raises StoreError as `reachable`
    does.
    """

    def present(wanted: Iterable[str]) -> dict[str, bytes]:
        found = {name: read(name) for name in wanted}
        return {name: data for name, data in found.items() if data is not None}  # not removed meanwhile

    parts = {part for text in names for part in text.split("/")}  # the run or tag of a name is one of them
    spoken = [name for name in list_names() if name.startswith(("runs/", "tags/"))]
    unread = {name: b"" for name in spoken if names and name.split("/")[1] not in parts}
    said = present(name for name in spoken if name not in unread)
    found = present(name for name in list_names() if name.startswith(("artifacts/", "steps/"))) | said
    return {name: found[name] for name in reachable(found | unread, names, where)}


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
    called = {found for name in names for found in _called(references, owners, name, where)}
    chosen = _with_upstream(references, owners, called)
    return [name for name in references if name in chosen]


def upstream(references: Mapping[str, bytes], names: Collection[str]) -> set[str]:
    """Some references, and the steps and artifacts behind them and all they were made from.

    Raises StoreError, code "damaged-reference", for one of them, or a step or artifact.
    """
    made = {name: data for name, data in references.items() if name.startswith(("artifacts/", "steps/"))}
    owners = _owners({name: reference_objects(name, data) for name, data in made.items()})
    return _with_upstream(references, owners, names)


def _with_upstream(
    references: Mapping[str, bytes], owners: Mapping[str, set[str]], names: Collection[str]
) -> set[str]:
    chosen = set(names)
    waiting = sorted(chosen)
    for name in waiting:  # grows while we walk
        for digest in reference_objects(name, references[name]):
            found = owners.get(digest, set()) - chosen
            chosen |= found
            waiting += sorted(found)
    return chosen


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
    found = {stage for place in spoken if (stage := _stage_at(references, place))}
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


def _stage_at(references: Mapping[str, bytes], place: str) -> str:
    """The tag or stage at a place, which may be one of the stage's results; empty if it has none such."""
    folder, name, *rest = place.split("/", 3)
    stage = "/".join([folder, name, *rest[:1]])
    if len(rest) < 2 or not is_readable(stage, references[stage]):
        return stage
    return stage if rest[1] in decode_stage(references[stage], str).record.results else ""
