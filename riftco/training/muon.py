"""Muon (Jordan et al. 2024) for the blocks' matrices, AdamW for everything else, behind the optimiser's face.

A matrix moves by its momentum with all singular values made about equal, so that directions the gradient
rarely shows are learned as fast as the common ones. Embeddings, head, norms and biases are no maps between
hidden spaces and stay with AdamW.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from artifacts import MuonOptions, OptimizerScalars, StepState
from artifacts.optimizer_state import is_muon_matrix
from kernels import orthogonalize
from riftco.model import AdamStepStats, ModelOptimizer
from riftco.training.adamw import AdamW, finite_norm, require_sane


class Muon(ModelOptimizer):
    """`learning_rate` is AdamW's; the matrices' rate keeps its ratio to it, so one schedule moves both.

    The rest does not decay. A decaying head cannot rule out the words that hardly ever come (docs/log.md).
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        learning_rate: float,
        *,
        matrix_learning_rate: float,
        weight_decay: float,
    ) -> None:
        require_sane(matrix_learning_rate, weight_decay)
        self.options = MuonOptions(
            learning_rate=learning_rate, matrix_learning_rate=matrix_learning_rate, weight_decay=weight_decay
        )
        super().__init__(parameters)
        matrices = {name: p for name, p in self.parameters.items() if is_muon_matrix(name, p.ndim)}
        others = {name: p for name, p in self.parameters.items() if name not in matrices}
        self._adamw = AdamW(others, learning_rate, weight_decay=0.0)
        self._stacks = [_Stack(names, matrices[names[0]]) for names in _alike(matrices)]
        self._momenta = {name: m for stack in self._stacks for name, m in stack.momenta().items()}
        self._rate_ratio = matrix_learning_rate / learning_rate

    @property
    def learning_rate(self) -> float:
        return self._adamw.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._adamw.learning_rate = value

    def _update(self, gradients: dict[str, Tensor]) -> AdamStepStats:
        """The norm reported is that of all gradients; only AdamW's share is clipped, for Muon's update does
        not depend on it."""
        norm = finite_norm(gradients)
        rate = self.learning_rate * self._rate_ratio
        momentum_share, decay = self.options.momentum, self.options.weight_decay
        stats = self._adamw.step()
        for stack in self._stacks:
            directions = stack.directions(gradients, momentum_share)
            matrices: list[Tensor] = [self.parameters[name] for name in stack.names]
            shape_scale = math.sqrt(max(1.0, matrices[0].shape[0] / matrices[0].shape[1]))
            torch._foreach_mul_(matrices, 1 - rate * decay)
            torch._foreach_add_(matrices, directions, alpha=-rate * shape_scale)
        self.step_count = stats.step
        return AdamStepStats(stats.step, norm, stats.clip_scale)

    def _first(self) -> list[list[Tensor]]:
        moments = self._momenta | self._adamw.first_moments
        return [[moments[name]] for name in self.parameters]

    def _second(self) -> list[list[Tensor]]:
        return [[moments] for moments in self._adamw.second_moments.values()]

    def _scalars(self) -> StepState:
        return StepState(self.options, self.step_count)

    def _set_scalars(self, scalars: OptimizerScalars) -> None:
        self.step_count = self._adamw.step_count = scalars.step_count

    def _drop(self) -> None:
        self._momenta, self._stacks = {}, []
        self._adamw.close()


class _Stack:
    """Matrices of one shape, whose products are made together: one call in place of one for each matrix."""

    def __init__(self, names: Sequence[str], like: Tensor) -> None:
        self.names = names
        self._momenta = like.new_zeros(len(names), *like.shape)

    def momenta(self) -> dict[str, Tensor]:
        """Each matrix's momentum, a view."""
        return dict(zip(self.names, self._momenta.unbind(), strict=True))

    def directions(self, gradients: Mapping[str, Tensor], share: float) -> list[Tensor]:
        """Add the gradients to the momenta; Nesterov's look ahead from there, made orthogonal."""
        ahead = torch.stack([gradients[name] for name in self.names])
        self._momenta.mul_(share).add_(ahead)
        return list(orthogonalize(ahead.add_(self._momenta, alpha=share)).unbind())


def _alike(matrices: Mapping[str, Tensor]) -> list[list[str]]:
    """The names, those of one shape together."""
    groups: dict[torch.Size, list[str]] = {}
    for name, matrix in matrices.items():
        groups.setdefault(matrix.shape, []).append(name)
    return list(groups.values())
