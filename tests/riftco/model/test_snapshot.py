"""An in-memory copy of a model: what it refuses to take, and to be loaded into."""

import dataclasses

import pytest
import torch

from riftco.model import DecoderOnlyTransformer, LoraConfig, ModelSnapshot
from riftco.serving import DecodeSession
from riftco.tokenizer import Tokenizer

TOKENIZER = Tokenizer(bytes(range(11)))


def test_it_is_taken_of_dense_weights_only(model: DecoderOnlyTransformer) -> None:
    model.quantize_nf4()
    with pytest.raises(RuntimeError, match="packed weights; merge them first"):
        ModelSnapshot.capture(model, TOKENIZER)
    model.attach_lora(LoraConfig(rank=2))
    with pytest.raises(RuntimeError, match="unmerged LoRA adapters; merge them first"):
        ModelSnapshot.capture(model, TOKENIZER)
    model.merge_lora()
    assert list(ModelSnapshot.capture(model, TOKENIZER).tensors) == list(model.base_parameters())


def test_values_that_are_not_finite_are_not_taken(model: DecoderOnlyTransformer) -> None:
    with torch.no_grad():
        model.final_norm.bias[2] = torch.nan
    with pytest.raises(ValueError, match=r"final_norm\.bias has values that are not finite"):
        ModelSnapshot.capture(model, TOKENIZER)


@pytest.mark.parametrize("change", [{"head_count": 2}, {"layer_norm_epsilon": 1e-3}, {"block_count": 1}])
def test_a_model_of_another_configuration_is_refused(
    model: DecoderOnlyTransformer, change: dict[str, float]
) -> None:
    snapshot = ModelSnapshot.capture(model, TOKENIZER)
    other = DecoderOnlyTransformer(dataclasses.replace(model.config, **change))
    with pytest.raises(ValueError, match="the snapshot's ModelConfig"):
        snapshot.load_into(other)


def test_a_model_of_another_seed_takes_the_values(model: DecoderOnlyTransformer) -> None:
    snapshot = ModelSnapshot.capture(model, TOKENIZER)
    other = DecoderOnlyTransformer(dataclasses.replace(model.config, random_seed=9))
    snapshot.load_into(other)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_busy_packed_or_adapted_model_is_refused(model: DecoderOnlyTransformer) -> None:
    snapshot = ModelSnapshot.capture(model, TOKENIZER)
    with DecodeSession(model), pytest.raises(ValueError, match="cannot load parameter values while"):
        snapshot.load_into(model)
    model.quantize_nf4()
    with pytest.raises(ValueError, match="names do not match"):
        snapshot.load_into(model)
    model.attach_lora(LoraConfig(rank=2))
    with pytest.raises(ValueError, match="while LoRA adapters are attached"):
        snapshot.load_into(model)
