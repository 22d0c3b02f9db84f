"""The loss against float64, under every kind of head, in one chunk of rows or more, and what it refuses."""

import pytest
import torch

from artifacts import ModelConfig
from riftco.model import DecoderOnlyTransformer, LoraConfig, loss, next_token_loss

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


HEADS = {
    "plain": (False, None),
    "adapter": (False, ("language_model_head",)),
    "packed": (True, ("attention.query",)),
    "packed with adapter": (True, ("attention.query", "language_model_head")),
}


@pytest.fixture(params=["one chunk", "chunks of 3 rows"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "one chunk":
        monkeypatch.setattr(loss, "_rows_at_once", lambda *_: 3)


@pytest.fixture(params=HEADS)
def model(request: pytest.FixtureRequest, chunks: None) -> DecoderOnlyTransformer:
    packed, targets = HEADS[request.param]
    model = DecoderOnlyTransformer(CONFIG)
    if packed:
        model.quantize_nf4()
    if targets is not None:
        model.attach_lora(LoraConfig(rank=2, targets=targets))
        with torch.no_grad():
            for i, parameter in enumerate(model.adapter_parameters().values()):
                parameter.copy_(torch.sin(torch.arange(parameter.numel()) + float(i)).view_as(parameter))
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
    expected = next_token_loss(model, IDS, TARGETS, MASK)
    assert torch.equal(expected, next_token_loss(model, IDS, TARGETS.masked_fill(~MASK, 10_000), MASK))


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


def test_its_gradients_scale_with_the_upstream_one_and_its_inputs_keep_their_bits(model) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in parameters]
    once = torch.autograd.grad(next_token_loss(model, IDS, TARGETS), parameters)
    twice = torch.autograd.grad(next_token_loss(model, IDS, TARGETS) * 2, parameters)
    for one, two in zip(once, twice, strict=True):
        torch.testing.assert_close(2 * one, two, atol=0, rtol=1e-6)
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


def test_without_gradients_it_is_the_same_number_and_none_are_computed(model) -> None:
    differentiated = []

    def look(head, inputs, logits) -> None:
        differentiated.append(logits.requires_grad)

    with torch.no_grad(), model.language_model_head.register_forward_hook(look):
        plain = next_token_loss(model, IDS, TARGETS, MASK)
    assert not plain.requires_grad
    assert not any(differentiated)
    assert torch.equal(plain, next_token_loss(model, IDS, TARGETS, MASK).detach())


def test_the_logits_of_a_packed_or_adapted_head_never_exist_at_once() -> None:
    """2,100 rows of 2,048 logits are two chunks; the largest tensor anybody sees is one of them."""
    config = ModelConfig(2048, 2100, 8, 1, 1, 8)
    ids = torch.arange(2100)[None] % 2048
    seen: list[int] = []
    for packed in (False, True):
        model = DecoderOnlyTransformer(config)
        model.attention = "flash"
        if packed:
            model.quantize_nf4()
        model.attach_lora(LoraConfig(rank=2, targets=("language_model_head",)))
        model.language_model_head.register_forward_hook(lambda _, __, output: seen.append(len(output)))
        next_token_loss(model, ids, ids).backward()
    assert seen == [1024, 1024, 52] * 2
