"""`TrainingCheckpoint`, the `.riftckpt` artifact: all that an interrupted run needs to go on bit by bit.

Like a bundle it is one immutable value whose identity is its content, and the reader accepts exactly what the
writer would write. It knows arrays and numbers; taking them from a live run, and putting them back, is
training's business.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from artifacts.arrays import FLOAT32, Floats, named_views, owned_floats, require_count
from artifacts.bundle_manifest import metadata_bytes
from artifacts.canonical_json import parse_json
from artifacts.checkpoint_manifest import (
    ADAPTER_NAME,
    CHECKPOINT_FORMAT,
    FIRST_MOMENTS_NAME,
    PACKED_NAME,
    SECOND_MOMENTS_NAME,
    VALUES_NAME,
    CheckpointManifest,
)
from artifacts.errors import ArtifactError, CheckpointError, refused_as
from artifacts.files import write_atomic
from artifacts.optimizer_state import AdamState, OptimizerScalars
from artifacts.packed_nf4 import PackedNf4Weight, decode_packed, encode_packed
from artifacts.specs import ModelConfig, ParameterSpec
from artifacts.training_state import BatchSourceState, LoraSpec, RandomState, linear_specs
from artifacts.zip_layout import MANIFEST_NAME, archive
from artifacts.zip_reader import ArchiveReader, open_archive

_ARGUMENTS = {
    VALUES_NAME: "values",
    ADAPTER_NAME: "adapter_values",
    FIRST_MOMENTS_NAME: "first_moments",
    SECOND_MOMENTS_NAME: "second_moments",
}


class TrainingCheckpoint:
    """A training run between two steps as pure data. Checkpoints are equal when their ids are."""

    __slots__ = ("_arrays", "_checkpoint_id", "_manifest", "_manifest_bytes", "_packed")

    def __init__(
        self,
        config: ModelConfig,
        values: NDArray[Any],
        *,
        optimizer: OptimizerScalars,
        first_moments: NDArray[Any],
        second_moments: NDArray[Any],
        python_random_state: RandomState,
        lora: LoraSpec | None = None,
        adapter_values: NDArray[Any] | None = None,
        packed_weights: Sequence[PackedNf4Weight] | None = None,
        batch_source: BatchSourceState | None = None,
        global_step: int | None = None,
        full_sequence_attention: str = "materialized",
        activation_checkpointing: str = "disabled",
        metadata: Mapping[str, Any] | None = None,
        format_version: int | None = None,
    ) -> None:
        """`values`: the dense base parameters, flat `[sum of counts]` in the order of `parameters`.

        The moments are flat in the order of the parameters that are trained: the adapters, whose values come
        in `adapter_values`, if there is a `lora`, else the base. Matrices that Muon moves have no second
        moment. `packed_weights` replace all linear weights of the base, in their order. `global_step`
        defaults to the optimizer's, `format_version` to 2 for Adam, else 3. All arrays are copied.

        Raises TypeError for a wrong type and CheckpointError for values that contradict each other, are not
        finite as float32, or give a manifest of more than 1 MiB.
        """
        if not isinstance(optimizer, OptimizerScalars):
            raise TypeError(f"optimizer must be an AdamState or a StepState, got {optimizer!r}")
        with refused_as(CheckpointError):
            if (lora is None) != (adapter_values is None):
                raise ArtifactError("lora", "a checkpoint has both lora and adapter_values, or neither")
            contents: dict[str, NDArray[Any] | None] = {
                VALUES_NAME: owned_floats("values", values),
                PACKED_NAME: None if packed_weights is None else _packed_bytes(packed_weights),
                ADAPTER_NAME: None
                if adapter_values is None
                else owned_floats("adapter_values", adapter_values),
                FIRST_MOMENTS_NAME: owned_floats("first_moments", first_moments),
                SECOND_MOMENTS_NAME: owned_floats("second_moments", second_moments),
            }
            arrays = {name: array for name, array in contents.items() if array is not None}
            manifest = CheckpointManifest(
                config=config,
                lora=lora,
                optimizer=optimizer,
                python_random_state=python_random_state,
                batch_source=batch_source,
                global_step=optimizer.step_count if global_step is None else global_step,
                full_sequence_attention=full_sequence_attention,
                activation_checkpointing=activation_checkpointing,
                packed_size=len(arrays[PACKED_NAME]) if PACKED_NAME in arrays else None,
                digests=tuple(hashlib.sha256(array.data).hexdigest() for array in arrays.values()),
                metadata=metadata_bytes(metadata),
                format_version=_version(optimizer) if format_version is None else format_version,
            )
            for name, parameters in _float_members(manifest).items():
                require_count(_ARGUMENTS[name], arrays[name], sum(spec.count for spec in parameters))
            self._set(manifest, *manifest.encode(), arrays)

    def _set(
        self,
        manifest: CheckpointManifest,
        checkpoint_id: str,
        manifest_bytes: bytes,
        arrays: dict[str, NDArray[Any]],
    ) -> None:
        """`arrays`: the members by name and in order, floats as such and the packed state as bytes."""
        self._manifest, self._checkpoint_id = manifest, checkpoint_id
        self._manifest_bytes, self._arrays = manifest_bytes, arrays
        self._packed = None
        if PACKED_NAME in arrays:
            self._packed = decode_packed(arrays[PACKED_NAME].tobytes())
            shapes = [weight.shape for weight in self._packed]
            expected = [spec.shape for spec in linear_specs(manifest.config)]
            if shapes != expected:
                raise ArtifactError("packed", f"packed weights must have the shapes {expected}, got {shapes}")

    @property
    def checkpoint_id(self) -> str:
        """64 hex digits: SHA-256 of the canonical manifest, which holds the SHA-256 of every array."""
        return self._checkpoint_id

    @property
    def format_version(self) -> int:
        """2 for Adam, 3 for the others; 1 if read from a file of version 1, and written as such again."""
        return self._manifest.format_version

    @property
    def config(self) -> ModelConfig:
        """Dimensions of the model."""
        return self._manifest.config

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Names and shapes of the dense base parameters, in the order of `values`."""
        return self._manifest.parameters

    @property
    def values(self) -> Floats:
        """The dense base parameters: read-only float32 `[sum of counts]`."""
        return self._arrays[VALUES_NAME]

    @property
    def packed_weights(self) -> tuple[PackedNf4Weight, ...] | None:
        """The linear weights of an NF4-packed base, in the order of the model; None for a dense base."""
        return self._packed

    @property
    def lora(self) -> LoraSpec | None:
        """The adapters that are trained; None if the base is."""
        return self._manifest.lora

    @property
    def adapter_parameters(self) -> tuple[ParameterSpec, ...]:
        """Names and shapes of the adapters, in the order of `adapter_values`; empty without `lora`."""
        return self._manifest.adapter_parameters

    @property
    def adapter_values(self) -> Floats | None:
        """The adapters: read-only float32 `[sum of counts]`."""
        return self._arrays.get(ADAPTER_NAME)

    @property
    def optimizer(self) -> OptimizerScalars:
        """The optimizer's settings and scalars; their type tells which it is."""
        return self._manifest.optimizer

    @property
    def first_moments(self) -> Floats:
        """Running means of the gradients: read-only float32, in the order of `trained_parameters`."""
        return self._arrays[FIRST_MOMENTS_NAME]

    @property
    def second_moments(self) -> Floats:
        """Running means of their squares: read-only float32, in the order of `second_moment_parameters`."""
        return self._arrays[SECOND_MOMENTS_NAME]

    @property
    def trained_parameters(self) -> tuple[ParameterSpec, ...]:
        """The parameters that the optimizer owns: the adapters, if there are any, else the base."""
        return self._manifest.trained_parameters

    @property
    def second_moment_parameters(self) -> tuple[ParameterSpec, ...]:
        """The trained parameters that have a second moment: all, but for the matrices that Muon moves."""
        return self._manifest.second_moment_parameters

    @property
    def python_random_state(self) -> RandomState:
        """State of Python's process-wide random generator."""
        return self._manifest.python_random_state

    @property
    def batch_source(self) -> BatchSourceState | None:
        """Where the source of batches stands, if the run has one that can tell."""
        return self._manifest.batch_source

    @property
    def global_step(self) -> int:
        """The caller's count of steps."""
        return self._manifest.global_step

    @property
    def full_sequence_attention(self) -> str:
        """Kind of attention of the run, "materialized" or "flash"."""
        return self._manifest.full_sequence_attention

    @property
    def activation_checkpointing(self) -> str:
        """What the run recomputes in backward, "disabled" or "block"."""
        return self._manifest.activation_checkpointing

    @property
    def metadata(self) -> dict[str, Any]:
        """A fresh copy of the free metadata."""
        return parse_json(self._manifest.metadata, what="metadata")

    def tensors(self) -> dict[str, Floats]:
        """Read-only views of the dense base parameters by name, each in its shape."""
        return named_views(self.parameters, self.values)

    def adapter_tensors(self) -> dict[str, Floats]:
        """Read-only views of the adapters by name, each in its shape; empty without `lora`."""
        return (
            {} if self.adapter_values is None else named_views(self.adapter_parameters, self.adapter_values)
        )

    def first_moment_tensors(self) -> dict[str, Floats]:
        """Read-only views of the first moments by parameter name, each in its shape."""
        return named_views(self.trained_parameters, self.first_moments)

    def second_moment_tensors(self) -> dict[str, Floats]:
        """Read-only views of the second moments by parameter name, each in its shape."""
        return named_views(self.second_moment_parameters, self.second_moments)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainingCheckpoint) and self._checkpoint_id == other._checkpoint_id

    def __hash__(self) -> int:
        return hash(self._checkpoint_id)

    def __repr__(self) -> str:
        return f"TrainingCheckpoint({self._checkpoint_id[:12]}, global_step={self.global_step})"

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes of the `.riftckpt` file, in pieces that share the arrays' memory."""
        members = [(name, array.view(np.uint8).data) for name, array in self._arrays.items()]
        return archive([(MANIFEST_NAME, self._manifest_bytes), *members])

    def to_bytes(self) -> bytes:
        """The bytes of the `.riftckpt` file."""
        return b"".join(self.chunks())

    def save(self, path: Path | str) -> Path:
        """Write the `.riftckpt` file in one step that survives a power loss, replacing a file of that name.

        Creates the folder. Raises IsADirectoryError if `path` is a folder, OSError if the disk refuses.
        """
        return write_atomic(path, self.chunks(), sync=True)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read and check a `.riftckpt` file, and map its arrays.

        The checkpoint keeps the file it read open, even if the path is replaced or removed later.
        Raises FileNotFoundError unless `path` is a regular file, CheckpointError unless it is canonical.
        """
        with open_archive(path, "checkpoint") as reader, refused_as(CheckpointError, str(path)):
            return cls._read(reader)

    @staticmethod
    def is_at(path: Path | str) -> bool:
        """Whether a file says in its manifest that it is a checkpoint; if so, `load` says whether it is one.

        Raises FileNotFoundError unless `path` is a regular file.
        """
        with open_archive(path, "checkpoint") as reader, suppress(ArtifactError):
            manifest = parse_json(reader.manifest(), what="manifest")
            return isinstance(manifest, dict) and manifest.get("format") == CHECKPOINT_FORMAT
        return False

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The checkpoint whose file has these bytes, which it keeps; CheckpointError unless canonical."""
        with refused_as(CheckpointError, "checkpoint"):
            return cls._read(ArchiveReader.of_bytes(bytes(data)))

    @classmethod
    def _read(cls, reader: ArchiveReader) -> Self:
        manifest_bytes = reader.manifest()
        manifest, checkpoint_id = CheckpointManifest.decode(manifest_bytes)
        members = manifest.members()
        arrays = reader.members(manifest_bytes, members)
        checkpoint = cls.__new__(cls)
        named = {
            member.name: array.view(FLOAT32) if member.is_float else array
            for member, array in zip(members, arrays, strict=True)
        }
        checkpoint._set(manifest, checkpoint_id, manifest_bytes, named)
        return checkpoint


def _float_members(manifest: CheckpointManifest) -> dict[str, tuple[ParameterSpec, ...]]:
    """The parameters whose values each float member holds."""
    members = {VALUES_NAME: manifest.parameters, FIRST_MOMENTS_NAME: manifest.trained_parameters}
    members[SECOND_MOMENTS_NAME] = manifest.second_moment_parameters
    return members | ({ADAPTER_NAME: manifest.adapter_parameters} if manifest.lora else {})


def _packed_bytes(weights: Sequence[PackedNf4Weight]) -> NDArray[np.uint8]:
    return np.frombuffer(encode_packed(weights), np.uint8)


def _version(optimizer: OptimizerScalars) -> int:
    return 2 if isinstance(optimizer, AdamState) else 3
