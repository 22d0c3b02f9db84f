"""Bundles become live models and live models become bundles."""

import copy
import dataclasses
import pickle
from collections.abc import Callable

import pytest
import torch

from artifacts import ModelBundle, ParameterSpec
from riftco import ModelRuntime, ModelSnapshot, capture_bundle
from riftco.backends import AUTO_ORDER, backend_available, resolve_backend
from riftco.errors import BackendUnavailableError
from riftco.model import LoraConfig
from tests.support import FIXTURES


@pytest.fixture
def bundle() -> ModelBundle:
    return ModelBundle.load(FIXTURES / "bpe-lora-child.rift")


def test_capture_gives_back_the_bundle_it_was_opened_from(bundle: ModelBundle) -> None:
    with ModelRuntime.open(bundle) as runtime:
        captured = capture_bundle(
            runtime.model,
            runtime.tokenizer,
            stage=bundle.stage,
            parent_artifact_id=bundle.parent_artifact_id,
            metadata=bundle.metadata,
        )
    assert captured.artifact_id == bundle.artifact_id


def test_capture_refuses_unmerged_adapters(bundle: ModelBundle) -> None:
    with ModelRuntime.open(bundle) as runtime:
        runtime.model.attach_lora(LoraConfig())
        with pytest.raises(RuntimeError, match="merge them first"):
            capture_bundle(runtime.model, runtime.tokenizer, stage="x")


def test_a_bundle_with_other_parameters_is_refused(bundle: ModelBundle) -> None:
    renamed = [ParameterSpec("other.weight", bundle.parameters[0].shape), *bundle.parameters[1:]]
    wrong = ModelBundle(bundle.config, bundle.tokenizer, renamed, bundle.weights, stage="x")
    with pytest.raises(ValueError, match="names do not match"):
        ModelRuntime.open(wrong)


@pytest.mark.parametrize("sizes", [{"model_width": 3 * 2**20}, {"block_count": 2**40}])
def test_a_bundle_that_lacks_its_models_parameters_is_refused_before_the_model_is_built(
    bundle: ModelBundle, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riftco.model.snapshot.DecoderOnlyTransformer", pytest.fail)
    config = dataclasses.replace(bundle.config, **sizes)
    wrong = ModelBundle(config, bundle.tokenizer, bundle.parameters, bundle.weights, stage="x")
    with pytest.raises(ValueError, match="do not match model"):
        ModelRuntime.open(wrong)


def test_a_snapshot_is_a_copy(bundle: ModelBundle) -> None:
    with ModelRuntime.open(bundle) as runtime:
        snapshot = ModelSnapshot.capture(runtime.model, runtime.tokenizer)
        with torch.no_grad():
            logits = runtime.model([1, 2, 3])
            runtime.model.token_embedding.weight.zero_()
        assert torch.equal(snapshot.build()([1, 2, 3]), logits)
        broken = dataclasses.replace(snapshot, tensors=dict(list(snapshot.tensors.items())[:-1]))
        with pytest.raises(ValueError, match="names do not match"):
            broken.load_into(runtime.model)


def test_a_closed_runtime_is_not_usable(bundle: ModelBundle) -> None:
    runtime = ModelRuntime.open(bundle)
    runtime.close()
    runtime.close()
    for use in (lambda: runtime.model, lambda: runtime.tokenizer):
        with pytest.raises(RuntimeError, match="closed"):
            use()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_runtime_is_not_copied(bundle: ModelBundle, duplicate: Callable[[ModelRuntime], object]) -> None:
    with ModelRuntime.open(bundle) as runtime, pytest.raises(TypeError, match="cannot be copied"):
        duplicate(runtime)


def test_auto_takes_the_first_backend_there_is_and_a_named_absent_one_is_an_error() -> None:
    assert resolve_backend("auto") == next(name for name in AUTO_ORDER if backend_available(name))
    assert resolve_backend("cpu") == "cpu"
    absent = [name for name in AUTO_ORDER if not backend_available(name)]
    for name in absent:
        with pytest.raises(BackendUnavailableError, match=f"{name.capitalize()} was requested"):
            resolve_backend(name)
    with pytest.raises(ValueError, match="unknown backend"):
        backend_available("abacus")
