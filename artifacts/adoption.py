"""Whether a store takes a reference that has come from elsewhere, and whether an artifact has its own id."""

from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.bundle_manifest import BundleManifest
from artifacts.checkpoint_manifest import CheckpointManifest
from artifacts.errors import ArtifactError, StoreError
from artifacts.records import Ref, decode_tag, moves_forward, reference_objects
from artifacts.zip_reader import open_archive

if TYPE_CHECKING:
    from artifacts.store import Store

_MANIFESTS = {"bundle": BundleManifest.decode, "checkpoint": CheckpointManifest.decode}


def would_adopt(store: "Store", name: str, data: bytes, *, force: bool = False) -> bool:
    """Whether `Store.adopt_reference` would write the reference; its objects need not be here yet."""
    standing = store.read_reference(name)
    if standing is None or standing == data:
        return standing is None
    if name.startswith("runs/"):
        return True
    if name.startswith("tags/"):
        return _moves(store, name.removeprefix("tags/"), data, force)
    try:
        return not all(map(store.objects.is_intact, reference_objects(name, standing)))
    except StoreError as error:
        if error.code != "damaged-reference":
            raise
        return True


def _moves(store: "Store", tag: str, data: bytes, force: bool) -> bool:
    try:
        return moves_forward(tag, store.tag(tag), decode_tag(data, str))
    except StoreError as error:
        if force and error.code in ("tag-diverged", "damaged-reference"):
            return True
        raise


def require_artifact(store: "Store", artifact_id: str, ref: Ref) -> None:
    """Raise StoreError, "damaged-reference", unless the object's manifest says that it has this id.

    The weights are not read.
    """
    try:
        found = store.objects.use(ref.digest, lambda path: _manifest_id(ref.kind, path))
    except StoreError:
        raise
    except ArtifactError as error:
        found = f"no {ref.kind} ({error})"
    if found != artifact_id:
        message = f"reference artifacts/{artifact_id} names object {ref.digest}, which is {found}"
        raise StoreError("damaged-reference", f"{message}: put the artifact again, or delete its file")


def _manifest_id(kind: str, path: Path) -> str:
    if kind not in _MANIFESTS:
        raise ArtifactError("wrong-kind", "an artifact is a bundle or a checkpoint")
    with open_archive(path, kind) as reader:
        return _MANIFESTS[kind](reader.manifest())[1]
