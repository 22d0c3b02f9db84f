"""A small store with a history, to be copied to remote ones."""

from pathlib import Path

from artifacts import StepRecord, Store, step_key
from tests.artifacts.bundles import small_bundle


def full_store(root: Path) -> Store:
    """Two steps, the second of which read the first's result; a bundle, a run of two stages and a tag."""
    store = Store.open(root, durability="none")
    corpus = store.put_bytes("text", b"all the words")
    finish(store, "demo", "corpus", {"inputs": {}}, corpus)
    model = store.put_bundle(small_bundle())
    finish(
        store, "demo", "pretrain", {"inputs": {"corpus": {"kind": "text", "digest": corpus.digest}}}, model
    )
    store.set_tag("best", model, None)
    return store


def small_store(root: Path) -> Store:
    """One reference of each kind, and their one object."""
    store = Store.open(root, durability="none")
    model = store.put_bundle(small_bundle())
    finish(store, "demo", "pretrain", {"inputs": {}}, model)
    store.set_tag("best", model, None)
    return store


def finish(store: Store, run: str, stage: str, recipe: dict, result) -> None:
    """Remember a step with one result and let a stage of a run be its name."""
    key = step_key(stage, 1, recipe)
    record = store.remember(key, StepRecord(stage, 1, recipe, {"result": result}, 1.0))
    store.name_run(run, stage, key, record)


def contents(root: Path) -> dict[str, bytes]:
    """Objects and references below a folder, by path."""
    files = [path for folder in ("objects", "refs") for path in (root / folder).rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}
