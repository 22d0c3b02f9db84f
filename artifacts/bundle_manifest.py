"""The manifest of a bundle: everything a `.rift` file says beside its weights, and the id over it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from artifacts.canonical_json import canonical_json, parse_json
from artifacts.errors import ArtifactError, BundleError
from artifacts.specs import ModelConfig, ParameterSpec, TokenizerSpec, parameters_json
from artifacts.zip_layout import MAXIMUM_MANIFEST_BYTES

WEIGHTS_NAME = "weights.f32le"

_FORMAT = "riftco-transformer-model-bundle"
_KEYS = {"artifact_id", "config", "format", "format_version", "metadata", "parameters"}
_KEYS |= {"parent_artifact_id", "stage", "tokenizer", "weights"}


@dataclass(frozen=True, slots=True)
class BundleManifest:
    """The checked content of `manifest.json`; `metadata` is canonical JSON."""

    config: ModelConfig
    tokenizer: TokenizerSpec
    parameters: tuple[ParameterSpec, ...]
    weights_sha256: str
    stage: str
    parent_artifact_id: str | None
    metadata: bytes

    def __post_init__(self) -> None:
        """Raise BundleError if the parts contradict each other, TypeError for a wrong type."""
        if self.config.vocabulary_size != self.tokenizer.vocabulary_size:
            raise BundleError(
                "vocabulary",
                f"config.vocabulary_size is {self.config.vocabulary_size}, but the tokenizer has "
                f"{self.tokenizer.vocabulary_size} tokens",
            )
        if not self.parameters:
            raise BundleError("parameters", "a bundle needs at least one parameter")
        names = [parameter.name for parameter in self.parameters]
        if len(set(names)) < len(names):
            raise BundleError("parameters", "a parameter name occurs twice")
        if not isinstance(self.stage, str):
            raise TypeError(f"stage must be a text, got {self.stage!r}")
        if not self.stage.strip():
            raise BundleError("stage", "stage must not be blank")
        if self.parent_artifact_id is not None and not is_digest(self.parent_artifact_id):
            raise BundleError(
                "parent",
                f"parent_artifact_id must be 64 lower-case hex digits, got {self.parent_artifact_id!r}",
            )

    @property
    def weight_count(self) -> int:
        """Number of float32 values of all parameters."""
        return sum(parameter.count for parameter in self.parameters)

    def encode(self) -> tuple[str, bytes]:
        """The artifact id and the bytes of `manifest.json`; BundleError if they pass 1 MiB."""
        return _encode(self._content())

    def _content(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "format_version": 1,
            "parent_artifact_id": self.parent_artifact_id,
            "stage": self.stage,
            "config": self.config.to_json(),
            "tokenizer": self.tokenizer.to_json(),
            "parameters": parameters_json(self.parameters),
            "weights": {
                "file": WEIGHTS_NAME,
                "dtype": "float32",
                "byte_order": "little",
                "count": self.weight_count,
                "sha256": self.weights_sha256,
            },
            "metadata": parse_json(self.metadata, what="metadata"),
        }

    @classmethod
    def decode(cls, data: bytes) -> tuple[Self, str]:
        """The manifest in the bytes of `manifest.json`, and the artifact id.

        Raises BundleError unless they are exactly the bytes that `encode` gives for their content.
        """
        try:
            value = parse_json(data, what="manifest.json")
            manifest = cls._from_json(value)
            content = manifest._content()
            for key in ("parameters", "weights"):  # offsets, counts and descriptor follow from the rest
                if value[key] != content[key]:
                    raise BundleError(key, f"{key} contradicts its own names, shapes and counts")
            artifact_id, canonical = _encode(content)
            if value["artifact_id"] != artifact_id:
                message = f"says {value['artifact_id']!r}, content has {artifact_id}"
                raise BundleError("id", f"artifact ID does not match: {message}")
        except BundleError:
            raise
        except ArtifactError as error:
            raise BundleError(error.code, str(error)) from error
        except (TypeError, ValueError, RecursionError) as error:
            raise BundleError("manifest", f"manifest.json: {error}") from error
        if canonical != data:
            raise BundleError(
                "not-canonical", "manifest.json is not canonical JSON: spaces, order or escapes"
            )
        return manifest, artifact_id

    @classmethod
    def _from_json(cls, value: Any) -> Self:
        if not isinstance(value, dict) or value.keys() != _KEYS:
            raise ValueError(f"must be an object with exactly the keys {sorted(_KEYS)}")
        if value["format"] != _FORMAT:
            raise BundleError("format", f"format must be {_FORMAT!r}, got {value['format']!r}")
        if type(value["format_version"]) is not int or value["format_version"] != 1:
            raise BundleError("format", f"format_version must be 1, got {value['format_version']!r}")
        if not isinstance(value["weights"], dict) or not is_digest(value["weights"].get("sha256")):
            raise ValueError("weights must be an object with a sha256 of 64 lower-case hex digits")
        if not isinstance(value["parameters"], list):
            raise TypeError("parameters must be an array")
        if not isinstance(value["metadata"], dict):
            raise TypeError("metadata must be an object")
        return cls(
            config=ModelConfig.from_json(value["config"]),
            tokenizer=TokenizerSpec.from_json(value["tokenizer"]),
            parameters=tuple(_parameter(entry) for entry in value["parameters"]),
            weights_sha256=value["weights"]["sha256"],
            stage=value["stage"],
            parent_artifact_id=value["parent_artifact_id"],
            metadata=canonical_json(value["metadata"]),
        )


def _encode(content: dict[str, Any]) -> tuple[str, bytes]:
    without_id = canonical_json(content)
    artifact_id = hashlib.sha256(without_id).hexdigest()
    data = b'{"artifact_id":"%s",' % artifact_id.encode() + without_id[1:]  # "artifact_id" sorts first
    if len(data) > MAXIMUM_MANIFEST_BYTES:
        raise BundleError(
            "manifest-size",
            f"the manifest has {len(data)} bytes, more than {MAXIMUM_MANIFEST_BYTES}: "
            "shorten the metadata or train fewer merges",
        )
    return artifact_id, data


def metadata_bytes(metadata: Mapping[str, Any] | None) -> bytes:
    """Canonical JSON of free metadata; TypeError for anything that is not a JSON object."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a mapping, got {type(metadata).__name__}")
    return canonical_json(dict(metadata or {}))


def is_digest(value: Any) -> bool:
    """Whether the value is a text of 64 lower-case hex digits."""
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _parameter(entry: Any) -> ParameterSpec:
    if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
        raise TypeError(f"a parameter must be an object with an array `shape`, got {entry!r}")
    return ParameterSpec(entry.get("name"), tuple(entry["shape"]))  # type: ignore[arg-type]
