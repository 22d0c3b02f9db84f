"""Adapters: where they go, what they train, and how they merge."""

import pytest
import torch

from kernels import cross_entropy
from riftco.config import LORA_TARGETS
from riftco.model import DecoderOnlyTransformer, LoraConfig

IDS = [3, 1, 4, 1, 5]


def _attached(model: DecoderOnlyTransformer, **settings: object) -> DecoderOnlyTransformer:
    model.attach_lora(LoraConfig(**{"rank": 2, "alpha": 3.0, "targets": LORA_TARGETS, **settings}))
    with torch.no_grad():
        for i, parameter in enumerate(model.adapter_parameters().values()):
            parameter.copy_(torch.sin(torch.arange(parameter.numel()) + float(i)).view_as(parameter))
    return model


@torch.no_grad()
def test_a_fresh_adapter_changes_nothing(model: DecoderOnlyTransformer) -> None:
    before = model(IDS)
    model.attach_lora(LoraConfig(targets=LORA_TARGETS))
    assert torch.equal(before, model(IDS))


@torch.no_grad()
def test_merging_keeps_the_function(model: DecoderOnlyTransformer) -> None:
    base = model(IDS)
    adapted = _attached(model)(IDS)
    model.merge_lora()
    assert not torch.allclose(base, adapted, atol=1e-2)
    torch.testing.assert_close(model(IDS), adapted, atol=1e-5, rtol=0)
    assert (model.lora, model.lora_merged) == (None, True)
    assert all(linear.lora_a is None and linear.lora_b is None for _, linear in model.projections())
    assert all(p.requires_grad for p in model.base_parameters().values())


def test_merged_weights_are_scale_times_b_a_on_top(model: DecoderOnlyTransformer) -> None:
    name = "blocks.1.feed_forward.expand"
    before = model.base_parameters()[f"{name}.weight"].detach().clone()
    _attached(model, rank=4, alpha=6.0, targets=["feed_forward.expand"])
    with model.adapter_parameters() as adapters:
        a, b = (adapters[f"{name}.lora_{side}.weight"].detach().double() for side in "ab")
    model.merge_lora()
    expected = before.double() + 1.5 * (b @ a)
    torch.testing.assert_close(
        model.base_parameters()[f"{name}.weight"].detach().double(), expected, atol=1e-5, rtol=0
    )


def test_only_adapters_receive_gradients(model: DecoderOnlyTransformer) -> None:
    _attached(model)
    cross_entropy(model(torch.tensor([IDS])), torch.tensor([IDS])).backward()
    assert all(p.grad is None for p in model.base_parameters().values())
    assert all(bool(p.grad.abs().sum() > 0) for p in model.adapter_parameters().values())


def test_targets_are_stored_in_the_models_order() -> None:
    config = LoraConfig(targets=["language_model_head", "attention.query"])
    assert config.targets == ("attention.query", "language_model_head")


@pytest.mark.parametrize("targets", [[], ["attention.query"] * 2, ["attention.gate"]])
def test_empty_repeated_and_unknown_targets_are_refused(targets: list[str]) -> None:
    with pytest.raises(ValueError, match="targets"):
        LoraConfig(targets=targets)


def test_a_rank_above_the_lesser_side_is_refused_before_any_change(model: DecoderOnlyTransformer) -> None:
    with pytest.raises(
        ValueError, match=r"rank 11 exceeds 10, the le\w+ side of blocks.0.feed_forward.expand"
    ):
        model.attach_lora(LoraConfig(rank=11, targets=["attention.query", "feed_forward.expand"]))
    assert model.lora is None
    assert list(model.base_parameters()) == [name for name, _ in model.named_parameters()]
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_adapter_is_attached_once_and_merged_once(model: DecoderOnlyTransformer) -> None:
    with pytest.raises(ValueError, match="no LoRA adapter"):
        model.merge_lora()
    _attached(model)
    with pytest.raises(ValueError, match="once per model"):
        model.attach_lora(LoraConfig())
    model.merge_lora()
    with pytest.raises(RuntimeError, match="once per model"):
        model.attach_lora(LoraConfig())
    with pytest.raises(ValueError, match="no LoRA adapter"):
        model.merge_lora()


def test_a_merge_that_would_overflow_changes_nothing(model: DecoderOnlyTransformer) -> None:
    _attached(model)
    before = {name: p.detach().clone() for name, p in model.base_parameters().items()}
    with torch.no_grad():
        model.adapter_parameters()["language_model_head.lora_b.weight"].fill_(3e38)
    with pytest.raises(ValueError, match=r"language_model_head\.weight not finite; nothing was changed"):
        model.merge_lora()
    assert all(torch.equal(p, before[name]) for name, p in model.base_parameters().items())
    assert model.lora is not None
