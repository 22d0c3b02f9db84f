"""`ModelBundle`, the `.rift` artifact: a model's config, tokenizer and float32 weights, one immutable value.

Its identity is its content: equal content gives equal bytes and an equal id. The reader computes from the
manifest what the file must be, and accepts exactly the bytes the writer would write. The weights of a loaded
bundle are hashed while they are read and then mapped from the file: memory holds only those that are used.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from artifacts.arrays import FLOAT32, Floats, named_views, owned_floats, require_count
from artifacts.bundle_manifest import WEIGHTS_NAME, BundleManifest, metadata_bytes
from artifacts.canonical_json import parse_json
from artifacts.errors import BundleError, refused_as
from artifacts.files import write_atomic
from artifacts.specs import ModelConfig, ParameterSpec, TokenizerSpec
from artifacts.zip_layout import MANIFEST_NAME, archive
from artifacts.zip_reader import ArchiveReader, Described, open_archive


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
        with refused_as(BundleError):
            owned = owned_floats("weights", weights)
        manifest = BundleManifest(
            config=config,
            tokenizer=tokenizer,
            parameters=tuple(parameters),
            weights_sha256=hashlib.sha256(owned.data).hexdigest(),
            stage=stage,
            parent_artifact_id=parent_artifact_id,
            metadata=metadata_bytes(metadata),
        )
        with refused_as(BundleError):
            require_count("weights", owned, manifest.weight_count)
        self._set(manifest, *manifest.encode(), owned)

    def _set(
        self, manifest: BundleManifest, artifact_id: str, manifest_bytes: bytes, weights: Floats
    ) -> None:
        self._manifest, self._artifact_id = manifest, artifact_id
        self._manifest_bytes, self._weights = manifest_bytes, weights

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
    def weights(self) -> Floats:
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

    def tensors(self) -> dict[str, Floats]:
        """Read-only float32 views of the weights by parameter name, each in its shape."""
        return named_views(self.parameters, self._weights)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelBundle) and self._artifact_id == other._artifact_id

    def __hash__(self) -> int:
        return hash(self._artifact_id)

    def __repr__(self) -> str:
        return f"ModelBundle({self._artifact_id[:12]}, stage={self.stage!r}, {self._weights.size} weights)"

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes of the `.rift` file, in pieces that share the weights' memory."""
        weights = self._weights.view(np.uint8).data
        return archive([(MANIFEST_NAME, self._manifest_bytes), (WEIGHTS_NAME, weights)])

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
        """Read and check a `.rift` file, and map its weights.

        The bundle keeps the file it read open, even if the path is replaced or removed later.
        Raises FileNotFoundError unless `path` is a regular file, BundleError unless its bytes are canonical.
        """
        with open_archive(path, "bundle") as reader, refused_as(BundleError, str(path)):
            return cls._read(reader)

    @staticmethod
    def identify(path: Path | str) -> str:
        """The artifact id by a `.rift` file's manifest, without reading the weights; errors of `load`."""
        with open_archive(path, "bundle") as reader, refused_as(BundleError, str(path)):
            return BundleManifest.decode(reader.manifest())[1]

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The bundle whose file has these bytes, which it keeps; BundleError unless they are canonical."""
        with refused_as(BundleError, "bundle"):
            return cls._read(ArchiveReader.of_bytes(bytes(data)))

    @classmethod
    def _read(cls, reader: ArchiveReader) -> Self:
        manifest_bytes = reader.manifest()
        manifest, artifact_id = BundleManifest.decode(manifest_bytes)
        size = FLOAT32.itemsize * manifest.weight_count
        described = Described(WEIGHTS_NAME, size, manifest.weights_sha256, is_float=True)
        (weights,) = reader.members(manifest_bytes, [described])
        bundle = cls.__new__(cls)
        bundle._set(manifest, artifact_id, manifest_bytes, weights.view(FLOAT32))
        return bundle
