"""Muon (Jordan et al. 2024) for the blocks' matrices, AdamW for everything else, behind the optimiser's face.

A matrix moves by its momentum with all singular values made about equal, so that directions the gradient
rarely shows are learned as fast as the common ones. Embeddings, head, norms and biases are no maps between
hidden spaces and stay with AdamW.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from riftco.model import AdamStepStats
from riftco.training.adamw import AdamW, finite_gradients

_MOMENTUM = 0.95
_QUINTIC = (3.4445, -4.7750, 2.0315)  # drives singular values to about 1 in five steps, from 1e-2 on
_ITERATIONS = 5


class Muon:
    """`learning_rate` is AdamW's; the matrices' rate keeps its ratio to it, so one schedule moves both."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        learning_rate: float,
        *,
        matrix_learning_rate: float,
        weight_decay: float,
    ) -> None:
        self.parameters = dict(parameters)
        self._matrices = {name: p for name, p in parameters.items() if _is_hidden_matrix(name, p)}
        others = {name: p for name, p in parameters.items() if name not in self._matrices}
        self._adamw = AdamW(others, learning_rate, weight_decay=weight_decay)
        self._momenta = {name: torch.zeros_like(p) for name, p in self._matrices.items()}
        self._rate_ratio = matrix_learning_rate / learning_rate
        self._weight_decay = weight_decay

    @property
    def learning_rate(self) -> float:
        return self._adamw.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._adamw.learning_rate = value

    @property
    def step_count(self) -> int:
        return self._adamw.step_count

    def zero_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> AdamStepStats:
        """One update from the current gradients, which it clears.

        The norm reported is that of all gradients; only AdamW's share is clipped, for Muon's update does not
        depend on it. ValueError, and nothing changed, when a gradient is missing or not finite.
        """
        gradients, norm = finite_gradients(self.parameters)
        rate = self.learning_rate * self._rate_ratio
        stats = self._adamw.step()
        for name, matrix in self._matrices.items():
            gradient, momentum = gradients[name], self._momenta[name]
            momentum.mul_(_MOMENTUM).add_(gradient)
            direction = orthogonalized(gradient.add(momentum, alpha=_MOMENTUM))
            shape_scale = math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
            matrix.mul_(1 - rate * self._weight_decay).add_(direction, alpha=-rate * shape_scale)
        self.zero_gradients()
        return AdamStepStats(stats.step, norm, stats.clip_scale)


def orthogonalized(matrix: Tensor) -> Tensor:
    """About U V^T of the matrix U S V^T `[rows, columns]`, by Newton-Schulz iteration in its own dtype."""
    a, b, c = _QUINTIC
    x = matrix / (matrix.norm() + 1e-7)
    if tall := x.shape[0] > x.shape[1]:
        x = x.mT
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def _is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and name.startswith("blocks.") and ".lora_" not in name
