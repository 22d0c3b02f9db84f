"""AdamW behind the face of the contract's Adam."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from artifacts import AdamWOptions, OptimizerScalars, StepState
from kernels import NonFiniteUpdateError
from riftco.model import AdamStepStats, ModelOptimizer

_LARGEST_RATE = 1e4
_LARGEST_NORM = 1e37  # Muon's momentum, up to 20 times as large, is finite in float32


class AdamW(ModelOptimizer):
    """AdamW (Loshchilov & Hutter 2017), torch's fused kernel, the gradient's global norm clipped at 1.

    Only matrices decay; biases, norms and embeddings do not. The kernel is called directly: constructing
    `torch.optim.AdamW` would import torch's compiler, 3 CPU seconds for nothing.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], learning_rate: float, *, weight_decay: float
    ) -> None:
        require_sane(learning_rate, weight_decay)
        self.options = AdamWOptions(learning_rate=learning_rate, weight_decay=weight_decay)
        super().__init__(parameters)
        self.learning_rate = learning_rate
        self.first_moments = {n: torch.zeros_like(p) for n, p in self.parameters.items()}
        self.second_moments = {n: torch.zeros_like(p) for n, p in self.parameters.items()}
        decayed = [name for name, parameter in self.parameters.items() if _decays(name, parameter)]
        others = [name for name in self.parameters if name not in decayed]
        self._groups = [(decayed, weight_decay), (others, 0.0)]

    def _update(self, gradients: dict[str, Tensor]) -> AdamStepStats:
        norm = finite_norm(gradients)
        limit = self.options.maximum_gradient_norm
        clip = limit / norm if norm > limit else 1.0
        if clip < 1.0:
            torch._foreach_mul_(list(gradients.values()), clip)
        for names, weight_decay in self._groups:
            if names:
                self._update_group(names, gradients, weight_decay)
        self.step_count += 1
        return AdamStepStats(self.step_count, norm, clip)

    def _update_group(self, names: list[str], gradients: dict[str, Tensor], weight_decay: float) -> None:
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        adamw(
            parameters,
            [gradients[name] for name in names],
            [self.first_moments[name] for name in names],
            [self.second_moments[name] for name in names],
            [],
            list(torch.full((len(names),), float(self.step_count), device=parameters[0].device)),
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=self.learning_rate,
            beta1=self.options.beta1,
            beta2=self.options.beta2,
            weight_decay=weight_decay,
            eps=self.options.epsilon,
        )

    def _first(self) -> list[list[Tensor]]:
        return [[moments] for moments in self.first_moments.values()]

    def _second(self) -> list[list[Tensor]]:
        return [[moments] for moments in self.second_moments.values()]

    def _scalars(self) -> StepState:
        return StepState(self.options, self.step_count)

    def _set_scalars(self, scalars: OptimizerScalars) -> None:
        self.step_count = scalars.step_count

    def _drop(self) -> None:
        self.first_moments, self.second_moments = {}, {}


def finite_norm(gradients: Mapping[str, Tensor]) -> float:
    """The global L2 norm of the gradients; NonFiniteUpdateError if it is above 1e37 or not finite."""
    norm = float(nn.utils.get_total_norm(gradients.values()))
    if not 1e-12 < norm < 1e12:  # squares may have left float32
        largest = float(nn.utils.get_total_norm(gradients.values(), math.inf))
        if 0 < largest < math.inf:
            norm = largest * float(nn.utils.get_total_norm([g / largest for g in gradients.values()]))
    require_small(norm)
    return norm


def require_small(norm: float) -> None:
    """NonFiniteUpdateError for a gradient norm above 1e37 or not finite."""
    if not norm <= _LARGEST_NORM:
        raise NonFiniteUpdateError(
            f"the gradient norm is {norm}; nothing was updated. Lower the learning rate"
        )


def require_sane(learning_rate: float, weight_decay: float) -> None:
    """ValueError for settings by which one step could overflow weights whose loss is still finite."""
    if learning_rate > _LARGEST_RATE:
        raise ValueError(f"a learning rate of {learning_rate} diverges; use at most {_LARGEST_RATE:g}")
    if learning_rate * weight_decay > 1:
        raise ValueError(
            f"a learning rate of {learning_rate} with a weight_decay of {weight_decay} takes more than all "
            f"of a weight in a step; use a weight_decay of at most {1 / learning_rate:g}"
        )


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "embedding" not in name
