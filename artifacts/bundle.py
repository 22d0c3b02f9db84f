"""`ModelBundle`, the `.rift` artifact: a model's config, tokenizer and float32 weights, one immutable value.

Its identity is its content: equal content gives equal bytes and an equal id. The reader computes from the
manifest what the file must be, compares the size before it allocates anything, and accepts exactly the bytes
the writer would write. Weights are read once, into memory of their own and not a mapping: a mapped file that
somebody truncates would kill the process, and one that somebody edits would change the value.
"""

import hashlib
import io
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from artifacts.bundle_manifest import MAXIMUM_MANIFEST_BYTES, WEIGHTS_NAME, BundleManifest, metadata_bytes
from artifacts.canonical_json import parse_json
from artifacts.errors import BundleError
from artifacts.files import write_atomic
from artifacts.specs import ModelConfig, ParameterSpec, TokenizerSpec
from artifacts.zip_layout import LOCAL_SIGNATURE, Fields, Member, directory, first_difference, join

Weights = NDArray[np.float32]

_LITTLE_FLOAT32 = np.dtype("<f4")
_MANIFEST_NAME = "manifest.json"
_CHUNK = 1 << 20


class ModelBundle:
    """A trained model as pure data. Bundles are equal when their artifact ids are."""

    __slots__ = ("_artifact_id", "_manifest", "_manifest_bytes", "_weights")

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: TokenizerSpec,
        parameters: Sequence[ParameterSpec],
        weights: NDArray[Any],
        *,
        stage: str,
        parent_artifact_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """`weights`: real numbers `[sum of counts]`, the tensors in row-major order; they are copied.

        Raises TypeError for a wrong type and BundleError for values that contradict each other, are not
        finite as float32, or give a manifest of more than 1 MiB.
        """
        owned = _owned_weights(weights)
        manifest = BundleManifest(
            config=config,
            tokenizer=tokenizer,
            parameters=tuple(parameters),
            weights_sha256=hashlib.sha256(owned.data).hexdigest(),
            stage=stage,
            parent_artifact_id=parent_artifact_id,
            metadata=metadata_bytes(metadata),
        )
        self._set(manifest, *manifest.encode(), owned)

    def _set(
        self, manifest: BundleManifest, artifact_id: str, manifest_bytes: bytes, weights: Weights
    ) -> None:
        if weights.shape != (manifest.weight_count,):
            raise BundleError(
                "weights",
                f"these parameters need weights of shape ({manifest.weight_count},), got {weights.shape}",
            )
        if not np.isfinite(weights).all():
            raise BundleError("not-finite", "weights must be finite as float32: found NaN or an infinity")
        weights.flags.writeable = False
        self._manifest, self._artifact_id = manifest, artifact_id
        self._manifest_bytes, self._weights = manifest_bytes, weights[:]  # a view cannot be made writeable

    @property
    def artifact_id(self) -> str:
        """64 hex digits: SHA-256 of the canonical manifest, which holds the SHA-256 of the weights."""
        return self._artifact_id

    @property
    def config(self) -> ModelConfig:
        """Dimensions of the model."""
        return self._manifest.config

    @property
    def tokenizer(self) -> TokenizerSpec:
        """State of the tokenizer."""
        return self._manifest.tokenizer

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Names and shapes of the tensors, in the order of the weights."""
        return self._manifest.parameters

    @property
    def weights(self) -> Weights:
        """All tensors in row-major order, one after the other: read-only float32 `[sum of counts]`."""
        return self._weights

    @property
    def stage(self) -> str:
        """What made the model, for example "pretraining"."""
        return self._manifest.stage

    @property
    def parent_artifact_id(self) -> str | None:
        """The id of the bundle this one was trained from."""
        return self._manifest.parent_artifact_id

    @property
    def metadata(self) -> dict[str, Any]:
        """A fresh copy of the free metadata."""
        return parse_json(self._manifest.metadata, what="metadata")

    def tensors(self) -> dict[str, Weights]:
        """Read-only float32 views of the weights by parameter name, each in its shape."""
        views, offset = {}, 0
        for parameter in self.parameters:
            views[parameter.name] = self._weights[offset : offset + parameter.count].reshape(parameter.shape)
            offset += parameter.count
        return views

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelBundle) and self._artifact_id == other._artifact_id

    def __hash__(self) -> int:
        return hash(self._artifact_id)

    def __repr__(self) -> str:
        return f"ModelBundle({self._artifact_id[:12]}, stage={self.stage!r}, {self._weights.size} weights)"

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes of the `.rift` file, in pieces that share the weights' memory."""
        manifest = Member(_MANIFEST_NAME, len(self._manifest_bytes), zlib.crc32(self._manifest_bytes))
        weights = Member(WEIGHTS_NAME, self._weights.nbytes, zlib.crc32(self._weights.data))
        yield join(manifest.local_header()) + self._manifest_bytes + join(weights.local_header())
        yield self._weights.data.cast("B")
        yield join(directory([manifest, weights]))

    def to_bytes(self) -> bytes:
        """The bytes of the `.rift` file."""
        return b"".join(self.chunks())

    def save(self, path: Path | str) -> Path:
        """Write the `.rift` file in one step, replacing a file of that name; creates the folder.

        Raises IsADirectoryError if `path` is a folder, OSError if the disk refuses.
        """
        return write_atomic(path, self.chunks())

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a `.rift` file.

        Raises FileNotFoundError unless `path` is a regular file, BundleError unless its bytes are canonical.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no bundle at {path}: not a regular file")
        with path.open("rb") as stream:
            return cls._read(stream, os.fstat(stream.fileno()).st_size, str(path))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The bundle whose file has these bytes; BundleError unless they are canonical."""
        return cls._read(io.BytesIO(data), len(data), "bundle")

    @classmethod
    def _read(cls, stream: BinaryIO, size: int, what: str) -> Self:
        try:
            return cls._read_strictly(stream, size)
        except BundleError as error:
            raise BundleError(error.code, f"{what}: {error}") from error

    @classmethod
    def _read_strictly(cls, stream: BinaryIO, size: int) -> Self:
        manifest_bytes = _read_manifest(stream)
        manifest, artifact_id = BundleManifest.decode(manifest_bytes)
        members = [
            Member(_MANIFEST_NAME, len(manifest_bytes), zlib.crc32(manifest_bytes)),
            Member(WEIGHTS_NAME, _LITTLE_FLOAT32.itemsize * manifest.weight_count, 0),
        ]
        _check_size(size, members)
        header = _read_exactly(stream, len(join(members[1].local_header())))
        weights, digest, crc = _read_weights(stream, manifest.weight_count)
        if digest != manifest.weights_sha256:
            raise BundleError("checksum", f"weights have SHA-256 {digest}, not {manifest.weights_sha256}")
        members[1] = Member(WEIGHTS_NAME, weights.nbytes, crc)
        _check_fields(header, members[1].local_header())
        _check_fields(stream.read(), directory(members))
        bundle = cls.__new__(cls)
        bundle._set(manifest, artifact_id, manifest_bytes, weights)
        return bundle


def _owned_weights(weights: NDArray[Any]) -> Weights:
    """A contiguous float32 copy, rounded by way of float64; what overflows becomes infinite."""
    array = np.asarray(weights)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"weights must be real numbers, got an array of {array.dtype}")
    if array.dtype != np.float32:
        array = array.astype(np.float64, copy=False)
    with np.errstate(over="ignore"):
        return array.astype(_LITTLE_FLOAT32, order="C", copy=True)


def _read_manifest(stream: BinaryIO) -> bytes:
    header = _read_exactly(stream, len(join(Member(_MANIFEST_NAME, 0, 0).local_header())))
    if not header.startswith(LOCAL_SIGNATURE):
        raise BundleError(
            "not-zip", "does not begin with a ZIP header: no bundle, or something in front of it"
        )
    declared = int.from_bytes(header[18:22], "little")  # compressed size, equal to the real one when stored
    if declared > MAXIMUM_MANIFEST_BYTES:
        raise BundleError("manifest-size", f"declares a manifest of {declared} bytes, more than 1 MiB")
    manifest = _read_exactly(stream, declared)
    _check_fields(header, Member(_MANIFEST_NAME, declared, zlib.crc32(manifest)).local_header())
    return manifest


def _check_size(size: int, members: list[Member]) -> None:
    expected = len(join(directory(members)))
    expected += sum(len(join(member.local_header())) + member.size for member in members)
    if size < expected:
        raise BundleError("truncated", f"has {size} bytes where its manifest asks for {expected}")
    if size > expected:
        raise BundleError(
            "trailing-bytes",
            f"has {size} bytes where its manifest asks for {expected}: a comment, an entry or bytes too many",
        )


def _check_fields(actual: bytes, expected: Fields) -> None:
    difference = first_difference(actual, expected)
    if difference:
        raise BundleError("container", f"is not a canonical ZIP file: {difference} differs")


def _read_weights(stream: BinaryIO, count: int) -> tuple[Weights, str, int]:
    """Weights with their SHA-256 and CRC-32, computed while reading."""
    weights = np.empty(count, _LITTLE_FLOAT32)
    view, digest, crc = weights.data.cast("B"), hashlib.sha256(), 0
    for start in range(0, len(view), _CHUNK):
        chunk = view[start : start + _CHUNK]
        if stream.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
            raise BundleError("truncated", "ends inside its weights")
        digest.update(chunk)
        crc = zlib.crc32(chunk, crc)
    return weights, digest.hexdigest(), crc


def _read_exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise BundleError("truncated", "ends inside a header or the manifest")
    return data
