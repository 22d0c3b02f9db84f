"""The manifest of a checkpoint: everything a `.riftckpt` file says beside its arrays, and the id over it.

The lists of parameters and members follow from the model's configuration, its adapters and whether its linear
weights are packed, so they are written and compared, never read.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from artifacts.arrays import FLOAT32
from artifacts.bundle_manifest import is_digest
from artifacts.canonical_json import canonical_json, parse_json
from artifacts.checks import require_choice, require_integer, require_keys
from artifacts.errors import ArtifactError
from artifacts.optimizer_state import OptimizerScalars, scalars_from_json, scalars_json
from artifacts.specs import ModelConfig, ParameterSpec, parameters_json
from artifacts.training_state import BatchSourceState, LoraSpec, RandomState, linear_specs
from artifacts.zip_layout import MAXIMUM_MANIFEST_BYTES
from artifacts.zip_reader import Described

VALUES_NAME = "model.f32le"
PACKED_NAME = "model-nf4.rtnf4"
ADAPTER_NAME = "adapter.f32le"
FIRST_MOMENTS_NAME = "adam-first-moments.f32le"
SECOND_MOMENTS_NAME = "adam-second-moments.f32le"

CHECKPOINT_FORMAT = "riftco-transformer-training-checkpoint"
_BOUNDARY = "post_optimizer_step"
_KEYS = {"format", "format_version", "checkpoint_id", "boundary", "global_step", "model", "optimizer"}
_KEYS |= {"python_random_state", "batch_source", "members", "metadata"}
_MODEL_KEYS = {"config", "full_sequence_attention", "activation_checkpointing", "quantized", "parameters"}
_MODEL_KEYS |= {"values_file", "lora", "adapter_parameters", "adapter_values_file"}
_OPTIMIZER_KEYS = {"scope", "first_moments_file", "second_moments_file"}  # besides those of its scalars
_OPTIMIZERS = {1: ("adam",), 2: ("adam",), 3: ("adamw", "muon")}  # by format version
_KINDS = {
    "config": ModelConfig,
    "lora": LoraSpec | None,
    "python_random_state": RandomState,
    "batch_source": BatchSourceState | None,
}


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """The checked content of `manifest.json`.

    `packed_size`: bytes of the packed NF4 state, None for a dense base; `digests`: SHA-256 of the members in
    file order; `metadata`: canonical JSON.
    """

    config: ModelConfig
    lora: LoraSpec | None
    optimizer: OptimizerScalars
    python_random_state: RandomState
    batch_source: BatchSourceState | None
    global_step: int
    full_sequence_attention: str
    activation_checkpointing: str
    packed_size: int | None
    digests: tuple[str, ...]
    metadata: bytes
    format_version: int
    parameters: tuple[ParameterSpec, ...] = field(init=False)
    adapter_parameters: tuple[ParameterSpec, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Raise ArtifactError if the parts contradict each other, TypeError for one of a wrong type."""
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} must be a {kind}, got {type(getattr(self, name)).__name__}")
        try:
            require_integer("format_version", self.format_version, 1, 3)
            require_integer("global_step", self.global_step, 0, None)
            require_choice("full_sequence_attention", self.full_sequence_attention, ("materialized", "flash"))
            require_choice("activation_checkpointing", self.activation_checkpointing, ("disabled", "block"))
        except ValueError as error:
            raise ArtifactError("manifest", str(error)) from error
        if self.optimizer.name not in _OPTIMIZERS[self.format_version]:
            raise ArtifactError(
                "format",
                f"a checkpoint of version {self.format_version} is of no {self.optimizer.name}: adam has the "
                "versions 1 and 2, adamw and muon version 3",
            )
        if self.packed_size is not None and self.format_version == 1:
            raise ArtifactError("format", "a checkpoint of version 1 has no packed weights: use version 2")
        if self.packed_size is not None and self.lora is None:
            raise ArtifactError(
                "lora", "packed weights cannot be trained: a checkpoint of them needs adapters"
            )
        packed = set(linear_specs(self.config)) if self.packed_size is not None else set()
        dense = tuple(spec for spec in self.config.parameter_specs() if spec not in packed)
        object.__setattr__(self, "parameters", dense)
        adapters = self.lora.adapter_specs(self.config) if self.lora else ()
        object.__setattr__(self, "adapter_parameters", adapters)

    @property
    def trained_parameters(self) -> tuple[ParameterSpec, ...]:
        """The parameters that the optimizer owns, in the order of its moments: the adapters, if any."""
        return self.adapter_parameters if self.lora else self.parameters

    @property
    def second_moment_parameters(self) -> tuple[ParameterSpec, ...]:
        """Those of the trained parameters that have a second moment: all, but for matrices under Muon."""
        return self.optimizer.with_second_moments(self.trained_parameters)

    def members(self) -> tuple[Described, ...]:
        """What the file must hold behind the manifest."""
        sizes = {VALUES_NAME: _float_bytes(self.parameters)}
        if self.packed_size is not None:
            sizes[PACKED_NAME] = self.packed_size
        if self.lora:
            sizes[ADAPTER_NAME] = _float_bytes(self.adapter_parameters)
        sizes[FIRST_MOMENTS_NAME] = _float_bytes(self.trained_parameters)
        sizes[SECOND_MOMENTS_NAME] = _float_bytes(self.second_moment_parameters)
        if len(self.digests) != len(sizes):
            raise ArtifactError("members", f"the members of this checkpoint must be {', '.join(sizes)}")
        return tuple(
            Described(name, size, digest, is_float=name != PACKED_NAME)
            for (name, size), digest in zip(sizes.items(), self.digests, strict=True)
        )

    def encode(self) -> tuple[str, bytes]:
        """The checkpoint id and the bytes of `manifest.json`; ArtifactError if they pass 1 MiB."""
        return _encode(self._content())

    def _content(self) -> dict[str, Any]:
        return {
            "format": CHECKPOINT_FORMAT,
            "format_version": self.format_version,
            "boundary": _BOUNDARY,
            "global_step": self.global_step,
            "model": self._model_json(),
            "optimizer": self._optimizer_json(),
            "python_random_state": self.python_random_state.to_json(),
            "batch_source": self.batch_source.to_json() if self.batch_source else None,
            "members": {member.name: _member_json(member) for member in self.members()},
            "metadata": parse_json(self.metadata, what="metadata"),
        }

    def _model_json(self) -> dict[str, Any]:
        packed = {"packed_state_file": PACKED_NAME if self.packed_size is not None else None}
        return (packed if self.format_version > 1 else {}) | {
            "config": self.config.to_json(),
            "full_sequence_attention": self.full_sequence_attention,
            "activation_checkpointing": self.activation_checkpointing,
            "quantized": self.packed_size is not None,
            "parameters": parameters_json(self.parameters),
            "values_file": VALUES_NAME,
            "lora": self.lora.to_json() if self.lora else None,
            "adapter_parameters": parameters_json(self.adapter_parameters),
            "adapter_values_file": ADAPTER_NAME if self.lora else None,
        }

    def _optimizer_json(self) -> dict[str, Any]:
        return scalars_json(self.optimizer) | {
            "scope": "adapter" if self.lora else "model",
            "first_moments_file": FIRST_MOMENTS_NAME,
            "second_moments_file": SECOND_MOMENTS_NAME,
        }

    @classmethod
    def decode(cls, data: bytes) -> tuple[Self, str]:
        """The manifest in the bytes of `manifest.json`, and the checkpoint id.

        Raises ArtifactError unless they are exactly the bytes that `encode` gives for their content.
        """
        try:
            value = parse_json(data, what="manifest.json")
            manifest = cls._from_json(value)
            content = manifest._content()
            _require_same(value, content)
            checkpoint_id, canonical = _encode(content)
            if value["checkpoint_id"] != checkpoint_id:
                message = f"says {value['checkpoint_id']!r}, content has {checkpoint_id}"
                raise ArtifactError("id", f"checkpoint ID does not match: {message}")
        except ArtifactError:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise ArtifactError("manifest", f"manifest.json: {error}") from error
        if canonical != data:
            raise ArtifactError(
                "not-canonical", "manifest.json is not canonical JSON: spaces, order or escapes"
            )
        return manifest, checkpoint_id

    @classmethod
    def _from_json(cls, value: Any) -> Self:
        require_keys("manifest.json", value, _KEYS)
        if value["format"] != CHECKPOINT_FORMAT:
            raise ArtifactError("format", f"format must be {CHECKPOINT_FORMAT!r}, got {value['format']!r}")
        version = value["format_version"]
        if type(version) is not int or version not in _OPTIMIZERS:
            raise ArtifactError("format", f"format_version must be 1, 2 or 3, got {version!r}")
        model, optimizer, members = value["model"], value["optimizer"], value["members"]
        require_keys("model", model, _MODEL_KEYS | ({"packed_state_file"} if version > 1 else set()))
        if not isinstance(value["metadata"], dict):
            raise TypeError("metadata must be an object")
        batch_source = value["batch_source"]
        return cls(
            config=_config(model),
            lora=None if model["lora"] is None else LoraSpec.from_json(model["lora"]),
            optimizer=scalars_from_json(optimizer, _OPTIMIZERS[version], _OPTIMIZER_KEYS),
            python_random_state=RandomState.from_json(value["python_random_state"]),
            batch_source=None if batch_source is None else BatchSourceState.from_json(batch_source),
            global_step=value["global_step"],
            full_sequence_attention=model["full_sequence_attention"],
            activation_checkpointing=model["activation_checkpointing"],
            packed_size=_packed_size(members) if model["quantized"] is True else None,
            digests=_digests(members),
            metadata=canonical_json(value["metadata"]),
            format_version=version,
        )


def _config(model: dict[str, Any]) -> ModelConfig:
    """The configuration, unless it asks for more blocks than there are parameters to list them."""
    config = ModelConfig.from_json(model["config"])
    if not isinstance(model["parameters"], list) or len(model["parameters"]) < config.block_count:
        raise TypeError("model.parameters must be an array of all parameters")
    return config


def _packed_size(members: Any) -> int:
    descriptor = members.get(PACKED_NAME) if isinstance(members, dict) else None
    if not isinstance(descriptor, dict):
        raise ValueError(f"members must describe {PACKED_NAME}, as the model is quantized")
    size: Any = descriptor.get("size")
    require_integer(f"size of {PACKED_NAME}", size, 1, None)
    return int(size)


def _digests(members: Any) -> tuple[str, ...]:
    """The SHA-256 of the members, in file order, which is not that of their sorted names."""
    if not isinstance(members, dict):
        raise TypeError("members must be an object")
    digests = []
    for name in (VALUES_NAME, PACKED_NAME, ADAPTER_NAME, FIRST_MOMENTS_NAME, SECOND_MOMENTS_NAME):
        descriptor = members.get(name)
        if descriptor is not None:
            if not isinstance(descriptor, dict) or not is_digest(descriptor.get("sha256")):
                raise ValueError(f"members must describe {name} with a sha256 of 64 lower-case hex digits")
            digests.append(descriptor["sha256"])
    return tuple(digests)


def _require_same(value: dict[str, Any], content: dict[str, Any]) -> None:
    """Raise ArtifactError unless what was not read (lists, names, sizes) follows from what was."""
    for key in ("boundary", "model", "optimizer", "members"):
        actual, expected = value[key], content[key]
        if actual == expected:
            continue
        if isinstance(expected, dict) and isinstance(actual, dict):
            names = sorted(n for n in expected.keys() | actual.keys() if expected.get(n) != actual.get(n))
            raise ArtifactError(key, f"{key} contradicts the rest of manifest.json in {', '.join(names)}")
        raise ArtifactError(key, f"{key} must be {expected!r}, got {actual!r}")


def _encode(content: dict[str, Any]) -> tuple[str, bytes]:
    checkpoint_id = hashlib.sha256(canonical_json(content)).hexdigest()
    data = canonical_json(content | {"checkpoint_id": checkpoint_id})
    if len(data) > MAXIMUM_MANIFEST_BYTES:
        raise ArtifactError(
            "manifest-size",
            f"the manifest has {len(data)} bytes, more than {MAXIMUM_MANIFEST_BYTES}: shorten the metadata",
        )
    return checkpoint_id, data


def _float_bytes(parameters: Iterable[ParameterSpec]) -> int:
    return FLOAT32.itemsize * sum(parameter.count for parameter in parameters)


def _member_json(member: Described) -> dict[str, Any]:
    content: dict[str, Any] = {"size": member.size, "sha256": member.sha256}
    if member.is_float:
        count = member.size // FLOAT32.itemsize
        return content | {"dtype": "float32", "byte_order": "little", "count": count}
    return content | {"dtype": "uint8", "encoding": "riftco-packed-nf4-v1", "count": member.size}
