"""The loss against float64, with and without an adapter on the head, and what it refuses."""

import pytest
import torch

from artifacts import ModelConfig
from riftco.model import DecoderOnlyTransformer, LoraConfig, next_token_loss

CONFIG = ModelConfig(
    vocabulary_size=7,
    maximum_context=5,
    model_width=8,
    head_count=2,
    block_count=1,
    feed_forward_width=8,
)
IDS = torch.tensor([[0, 1, 2, 3, 4], [5, 6, 0, 1, 2]])
TARGETS = torch.tensor([[1, 2, 3, 4, 5], [6, 0, 1, 2, 3]])
MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)


@pytest.fixture(params=["plain", "adapter on the head"])
def model(request: pytest.FixtureRequest) -> DecoderOnlyTransformer:
    model = DecoderOnlyTransformer(CONFIG)
    if request.param != "plain":
        model.attach_lora(LoraConfig(rank=2, targets=("language_model_head",)))
    with torch.no_grad():
        model.token_embedding.weight *= 20  # far from uniform
    return model


def test_it_is_the_mean_negative_log_likelihood_of_the_selected_positions(model) -> None:
    likelihood = model(IDS).detach().double().log_softmax(-1).gather(-1, TARGETS[..., None])[..., 0]
    whole, selected = next_token_loss(model, IDS, TARGETS), next_token_loss(model, IDS, TARGETS, MASK)
    assert whole.item() == pytest.approx(-likelihood.mean().item(), rel=1e-6)
    assert selected.item() == pytest.approx(-likelihood[MASK].mean().item(), rel=1e-6)
    assert selected.dtype == torch.float32


def test_what_is_not_selected_has_no_influence(model) -> None:
    loss = next_token_loss(model, IDS, TARGETS, MASK)
    assert torch.equal(loss, next_token_loss(model, IDS, TARGETS.masked_fill(~MASK, 10_000), MASK))


def test_its_gradients_are_those_of_the_logits(model) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = torch.autograd.grad(next_token_loss(model, IDS, TARGETS, MASK), parameters)
    logits = model(IDS).double()
    plain = torch.nn.functional.cross_entropy(logits[MASK], TARGETS[MASK])
    for ours, exact in zip(fused, torch.autograd.grad(plain, parameters), strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-6, rtol=1e-5)


def test_targets_outside_the_vocabulary_and_empty_masks_are_refused(model) -> None:
    with pytest.raises(ValueError, match="no position"):
        next_token_loss(model, IDS, TARGETS, torch.zeros_like(MASK))
    for wrong in (-1, 7, -100):
        targets = TARGETS.clone()
        targets[0, 0] = wrong
        with pytest.raises(ValueError, match="outside the vocabulary of 7"):
            next_token_loss(model, IDS, targets)
