"""`PreparedDataset`: a folder of training, validation and test records with a manifest that proves them.

The folder was made in one step and does not change; opening it means checking it, so that no stage trains on
half a download. Nothing here fetches or splits anything.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts.bundle_manifest import is_digest
from artifacts.canonical_json import parse_json
from artifacts.checks import require_integer
from artifacts.errors import DatasetError, refused_as

PARTITIONS = ("train", "validation", "test")

_FORMAT = "riftco-transformer.prepared-dataset.v1"
_MANIFEST_NAME = "manifest.json"
_SOURCE_TEXTS = ("dataset", "config", "split", "dataset_url", "rows_api_url", "license")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class PreparedFile:
    """One partition: its path, media type, number of records, size in bytes and SHA-256."""

    path: Path
    media_type: str
    records: int
    size: int
    sha256: str

    def read_verified_bytes(self) -> bytes:
        """The bytes of the file; DatasetError, code "file", unless they are those of the manifest."""
        data = _read(self.path)
        self._require_hash(len(data), hashlib.sha256(data).hexdigest())
        return data

    def verify(self) -> None:
        """Raise DatasetError unless the file has the manifest's bytes and, as JSON lines, its records."""
        by_line = self.path.suffix == ".jsonl"
        hasher, size, lines = hashlib.sha256(), 0, 0
        with _opening(self.path), self.path.open("rb") as stream:
            for piece in stream if by_line else iter(lambda: stream.read(_CHUNK), b""):
                hasher.update(piece)
                size += len(piece)
                lines += 1
                if by_line:
                    _require_record(piece, f"{self.path}, line {lines}")
        self._require_hash(size, hasher.hexdigest())
        if by_line and lines != self.records:
            raise DatasetError(
                "records", f"{self.path} has {lines} lines where its manifest counts {self.records} records"
            )

    def _require_hash(self, size: int, digest: str) -> None:
        if (size, digest) != (self.size, self.sha256):
            raise DatasetError(
                "file",
                f"{self.path} has {size} bytes of SHA-256 {digest} where its manifest says {self.size} bytes "
                f"of {self.sha256}: prepare the dataset again",
            )


@dataclass(frozen=True, slots=True)
class PreparedDataset:
    """A verified folder. `manifest_sha256`: of the bytes of its manifest, and so of everything in it."""

    directory: Path
    files: Mapping[str, PreparedFile]
    manifest_bytes: bytes
    manifest_sha256: str

    @property
    def manifest_path(self) -> Path:
        """Where the manifest lies."""
        return self.directory / _MANIFEST_NAME

    @property
    def manifest(self) -> dict[str, Any]:
        """A fresh copy of the manifest's content."""
        return parse_json(self.manifest_bytes, what=str(self.manifest_path))

    def file(self, partition: str) -> PreparedFile:
        """The file of "train", "validation" or "test"; DatasetError, code "partition", for another name."""
        if partition not in self.files:
            raise DatasetError(
                "partition", f"a prepared dataset has {', '.join(PARTITIONS)}, but no {partition!r}"
            )
        return self.files[partition]


def verify_prepared_dataset(directory: Path | str) -> PreparedDataset:
    """The dataset in a folder, every file of which is read and checked; DatasetError if anything is amiss."""
    directory = Path(directory)
    path = directory / _MANIFEST_NAME
    if not directory.is_dir():
        raise DatasetError("missing", f"no prepared dataset at {directory}: no such folder")
    data = _read(path)
    with refused_as(DatasetError):
        manifest = parse_json(data, what=str(path))
    try:
        files = _described_files(directory, manifest)
        canonical = json.dumps(manifest, sort_keys=True, indent=2, ensure_ascii=False) + "\n"
    except DatasetError as error:
        raise DatasetError(error.code, f"{path}: {error}") from error
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise DatasetError("manifest", f"{path}: {what}") from error
    if canonical.encode() != data:
        raise DatasetError(
            "not-canonical", f"{path} is spelled differently from what prepares datasets: prepare it again"
        )
    for file in files.values():
        file.verify()
    return PreparedDataset(directory, files, data, hashlib.sha256(data).hexdigest())


def is_prepared_dataset(directory: Path | str) -> bool:
    """Whether a folder has the manifest of a prepared dataset; nothing in it is checked."""
    try:
        return _FORMAT.encode() in (Path(directory) / _MANIFEST_NAME).read_bytes()
    except OSError:
        return False


def _described_files(directory: Path, manifest: Any) -> Mapping[str, PreparedFile]:
    """What the files must be, once the manifest's parts agree with each other."""
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise DatasetError("format", f"is not of the format {_FORMAT}")
    _require_source(_object(manifest, "source"))
    _require_identity(_object(manifest, "partitioning"))
    counts = _object(manifest, "counts")
    _require_counts(counts, _object(manifest, "deduplication"))
    _require_ranges(_object(manifest["source"], "selection")["row_ranges"], counts["source_rows"])
    serialization, files = _object(manifest, "serialization"), _object(manifest, "files")
    if files.keys() != set(PARTITIONS):
        raise DatasetError("files", f"files must be {', '.join(PARTITIONS)}, got {sorted(files)}")
    extension = serialization["file_extension"]
    if not isinstance(extension, str) or extension[:1] != "." or not extension[1:].isalnum():
        raise DatasetError("extension", f"file_extension must be a dot and letters, got {extension!r}")
    return {
        partition: _described_file(
            directory / f"{partition}{extension}",
            _object(files, partition),
            serialization["media_type"],
            counts[partition],
        )
        for partition in PARTITIONS
    }


def _described_file(path: Path, described: dict[str, Any], media_type: Any, records: int) -> PreparedFile:
    for key, expected in (("path", path.name), ("media_type", media_type), ("records", records)):
        if described[key] != expected or type(described[key]) is not type(expected):
            raise DatasetError("files", f"{key} of {path.name} must be {expected!r}, got {described[key]!r}")
    require_integer(f"bytes of {path.name}", described["bytes"], 0, None)
    if not is_digest(described["sha256"]):
        raise DatasetError(
            "files", f"sha256 of {path.name} must be 64 hex digits, got {described['sha256']!r}"
        )
    return PreparedFile(path, media_type, records, described["bytes"], described["sha256"])


def _require_source(source: dict[str, Any]) -> None:
    for key in _SOURCE_TEXTS:
        if not isinstance(source[key], str) or not source[key].strip():
            raise DatasetError(
                "source", f"source.{key} must be a text that is not blank, got {source[key]!r}"
            )


def _require_identity(partitioning: dict[str, Any]) -> None:
    fields = partitioning["identity_fields"]
    texts = isinstance(fields, list) and all(isinstance(name, str) and name for name in fields)
    if not texts or not fields or len(set(fields)) < len(fields):
        raise DatasetError("identity", f"identity_fields must be some names, each once, got {fields!r}")


def _require_counts(counts: dict[str, Any], deduplication: dict[str, Any]) -> None:
    for name in ("source_rows", "adapted_records", "duplicates_removed", *PARTITIONS):
        require_integer(f"counts.{name}", counts[name], 0, None)
    duplicates, adapted = counts["duplicates_removed"], counts["adapted_records"]
    if deduplication["duplicates_removed"] != duplicates:
        raise DatasetError("counts", "deduplication.duplicates_removed is not counts.duplicates_removed")
    if counts["source_rows"] != adapted + duplicates:
        raise DatasetError(
            "counts", "counts.source_rows is not adapted_records and duplicates_removed together"
        )
    if sum(counts[partition] for partition in PARTITIONS) != adapted:
        raise DatasetError("counts", "train, validation and test are not counts.adapted_records together")


def _require_ranges(ranges: Any, rows: int) -> None:
    if not isinstance(ranges, list) or not all(isinstance(row_range, dict) for row_range in ranges):
        raise TypeError("row_ranges must be an array of objects")
    end, total = 0, 0
    for row_range in ranges:
        require_integer("length of a row range", row_range["length"], 1, None)
        require_integer("offset of a row range", row_range["offset"], 0, None)
        if row_range["offset"] < end:
            raise DatasetError("ranges", f"row_ranges overlap or are out of order at {row_range['offset']}")
        end = row_range["offset"] + row_range["length"]
        total += row_range["length"]
    if total != rows:
        raise DatasetError("ranges", f"row_ranges cover {total} rows, but counts.source_rows is {rows}")


def _require_record(line: bytes, what: str) -> None:
    with refused_as(DatasetError):
        record = parse_json(line, what=what)
    if not isinstance(record, dict) or "" in record:
        raise DatasetError("records", f"{what} is no JSON object whose keys have names")
    for key, value in record.items():
        if not isinstance(value, str):
            raise DatasetError("records", f"{what}: {key!r} must be a text, got {type(value).__name__}")


def _object(parent: dict[str, Any], key: str) -> dict[str, Any]:
    value = parent[key]
    if not isinstance(value, dict):
        raise TypeError(f"{key} must be an object")
    return value


def _read(path: Path) -> bytes:
    with _opening(path):
        return path.read_bytes()


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Errors of reading `path`, or its being no regular file, become DatasetError, code "missing"."""
    try:
        if not path.is_file():
            raise DatasetError("missing", f"{path} is missing or no regular file: prepare the dataset again")
        yield
    except OSError as error:
        raise DatasetError("missing", f"{path} cannot be read: {error}") from error
