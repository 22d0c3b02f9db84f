"""`STORE.json`, which says that a folder, bucket or archive is a store, and of which format and version."""

from artifacts.canonical_json import canonical_json, parse_json
from artifacts.errors import ArtifactError, StoreError

MARKER_NAME = "STORE.json"
MARKER = canonical_json({"format": "riftco-store", "version": 1, "hash": "sha256"})
OWN_ENTRIES = frozenset({MARKER_NAME, "objects", "refs", "tmp", "quarantine", "locks", "work"})
"""Names directly in a store; whatever else is there belongs to something that is no store."""


def require_marker(data: bytes, where: str) -> None:
    """Raise StoreError unless these are the bytes of the marker of a store this program knows.

    Code "not-a-store" for another format, "newer-store" for another version; `where` is for the message.
    """
    try:
        content = parse_json(data, what=f"{where}/{MARKER_NAME}")
    except ArtifactError as error:
        raise StoreError("not-a-store", f"{where} is not a store: {error}") from error
    if not isinstance(content, dict) or content.get("format") != "riftco-store":
        raise StoreError("not-a-store", f"{where} is not a store: {MARKER_NAME} is of another format")
    if canonical_json(content) != MARKER:
        raise StoreError("newer-store", f"{where} is a store of a later version: update riftco to use it")
