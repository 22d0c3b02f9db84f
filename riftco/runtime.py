"""From a bundle to a live model and back."""

from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import torch

from artifacts import BundleError, ModelBundle, ModelConfig, ParameterSpec
from artifacts.bundle_manifest import BundleManifest, metadata_bytes
from artifacts.zip_layout import MAXIMUM_MANIFEST_BYTES
from riftco.backends import BackendName, resolve_backend
from riftco.errors import InputError
from riftco.model import DecoderOnlyTransformer, ModelSnapshot
from riftco.tokenizer import Tokenizer

_LEAST_BLOCK_BYTES = 1000  # of a manifest, which lists a block's 16 parameters


class ModelRuntime:
    """A live model and its tokenizer, opened from a bundle; a context manager."""

    def __init__(self, model: DecoderOnlyTransformer, tokenizer: Tokenizer) -> None:
        self._model: DecoderOnlyTransformer | None = model
        self._tokenizer: Tokenizer | None = tokenizer

    @classmethod
    def open(cls, bundle: ModelBundle, backend: BackendName = "cpu") -> Self:
        """Build the bundle's model on a backend.

        ValueError when the bundle's parameters are not its configuration's, BackendUnavailableError when the
        machine lacks the backend.
        """
        backend = resolve_backend(backend)
        model = snapshot_of(bundle).build().move_to(backend)
        return cls(model, Tokenizer.from_spec(bundle.tokenizer))

    @property
    def model(self) -> DecoderOnlyTransformer:
        if self._model is None:
            raise RuntimeError("the model runtime is closed")
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RuntimeError("the model runtime is closed")
        return self._tokenizer

    def close(self) -> None:
        """Let go of model and tokenizer; harmless when repeated."""
        self._model = self._tokenizer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a live model cannot be copied; capture a bundle and open it again")


def snapshot_of(bundle: ModelBundle) -> ModelSnapshot:
    """The bundle's configuration, tokenizer and weights as an in-memory snapshot."""
    tensors = {name: torch.tensor(values) for name, values in bundle.tensors().items()}
    return ModelSnapshot(bundle.config, bundle.tokenizer, tensors)


def require_bundle_fits(
    config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    stage: str,
    parent_artifact_id: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> None:
    """InputError if the bundle of such a model, whatever its weights, would be refused: too large a manifest.

    To be asked before the model is built.
    """
    no_weights = "0" * 64
    try:
        if config.block_count * _LEAST_BLOCK_BYTES > MAXIMUM_MANIFEST_BYTES:
            raise BundleError("manifest-size", f"a manifest has at most {MAXIMUM_MANIFEST_BYTES} bytes")
        BundleManifest(
            config,
            tokenizer.spec,
            config.parameter_specs(),
            no_weights,
            stage,
            parent_artifact_id,
            metadata_bytes(metadata),
        ).encode()
    except BundleError as error:
        sizes = f"vocabulary_size {config.vocabulary_size} and block_count {config.block_count}"
        raise InputError(f"{sizes} are too large for a bundle: {error}") from error


def capture_bundle(
    model: DecoderOnlyTransformer,
    tokenizer: Tokenizer,
    *,
    stage: str,
    parent_artifact_id: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> ModelBundle:
    """An immutable bundle of a live model; RuntimeError while LoRA adapters are attached."""
    snapshot = ModelSnapshot.capture(model, tokenizer)
    return ModelBundle(
        snapshot.config,
        snapshot.tokenizer,
        [ParameterSpec(name, tuple(tensor.shape)) for name, tensor in snapshot.tensors.items()],
        np.concatenate([tensor.numpy().ravel() for tensor in snapshot.tensors.values()]),
        stage=stage,
        parent_artifact_id=parent_artifact_id,
        metadata=metadata,
    )
