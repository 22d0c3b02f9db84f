"""The loss against float64, and what it refuses."""

import pytest
import torch

from riftco.model import cross_entropy


def _case() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return 20 * torch.randn(2, 5, 7, generator=generator), torch.randint(0, 7, (2, 5), generator=generator)


def test_it_is_the_mean_negative_log_likelihood_of_the_selected_positions() -> None:
    logits, targets = _case()
    likelihood = logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    assert cross_entropy(logits, targets).item() == pytest.approx(-likelihood.mean().item(), rel=1e-6)
    selected = cross_entropy(logits, targets, mask).item()
    assert selected == pytest.approx(-likelihood[mask].mean().item(), rel=1e-6)


def test_what_is_not_selected_has_no_influence() -> None:
    logits, targets = _case()
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3] = False
    loss = cross_entropy(logits, targets, mask)
    logits[1, 3], targets[1, 3] = 1e30, 10_000
    assert torch.equal(loss, cross_entropy(logits, targets, mask))


def test_targets_outside_the_vocabulary_and_empty_masks_are_refused() -> None:
    logits, targets = _case()
    with pytest.raises(ValueError, match="no position"):
        cross_entropy(logits, targets, torch.zeros(2, 5, dtype=torch.bool))
    for wrong in (-1, 7, -100):
        targets[0, 0] = wrong
        with pytest.raises(ValueError, match="outside the vocabulary of 7"):
            cross_entropy(logits, targets)
