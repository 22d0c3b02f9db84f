"""AdamW behind the face of the contract's Adam."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from riftco.model import AdamStepStats

_BETA1, _BETA2 = 0.9, 0.95  # usual for language models: 0.999 remembers longer than a short run lasts
_EPSILON = 1e-8
_MAXIMUM_GRADIENT_NORM = 1.0


class AdamW:
    """AdamW (Loshchilov & Hutter 2017), torch's fused kernel, the gradient's global norm clipped at 1.

    Only matrices decay; biases, norms and embeddings do not. The kernel is called directly: constructing
    `torch.optim.AdamW` would import torch's compiler, 3 CPU seconds for nothing.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], learning_rate: float, *, weight_decay: float
    ) -> None:
        if not parameters:
            raise ValueError("AdamW needs at least one parameter")
        self.parameters = dict(parameters)
        self.learning_rate = learning_rate
        self.step_count = 0
        self.first_moments = {n: torch.zeros_like(p) for n, p in parameters.items()}
        self.second_moments = {n: torch.zeros_like(p) for n, p in parameters.items()}
        decayed = [name for name, parameter in parameters.items() if _decays(name, parameter)]
        others = [name for name in parameters if name not in decayed]
        self._groups = [(decayed, weight_decay), (others, 0.0)]

    def zero_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> AdamStepStats:
        """One update from the gradients, which it clears.

        ValueError, and nothing changed, when a gradient is missing or their norm is not finite.
        """
        gradients, norm = finite_gradients(self.parameters)
        clip = _MAXIMUM_GRADIENT_NORM / norm if norm > _MAXIMUM_GRADIENT_NORM else 1.0
        if clip < 1.0:
            torch._foreach_mul_(list(gradients.values()), clip)
        for names, weight_decay in self._groups:
            if names:
                self._update(names, gradients, weight_decay)
        self.step_count += 1
        self.zero_gradients()
        return AdamStepStats(self.step_count, norm, clip)

    def _update(self, names: list[str], gradients: dict[str, Tensor], weight_decay: float) -> None:
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        adamw(
            parameters,
            [gradients[name] for name in names],
            [self.first_moments[name] for name in names],
            [self.second_moments[name] for name in names],
            [],
            [torch.tensor(float(self.step_count), device=p.device) for p in parameters],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=self.learning_rate,
            beta1=_BETA1,
            beta2=_BETA2,
            weight_decay=weight_decay,
            eps=_EPSILON,
        )


def finite_gradients(parameters: Mapping[str, nn.Parameter]) -> tuple[dict[str, Tensor], float]:
    """Every parameter's gradient, and their global L2 norm; ValueError for a missing or not finite one."""
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    if missing := parameters.keys() - gradients.keys():
        raise ValueError(f"{min(missing)} has no gradient; call backward before step")
    norm = float(nn.utils.get_total_norm(gradients.values()))
    if not math.isfinite(norm):
        raise ValueError(f"the gradient norm is {norm}; nothing was updated. Lower the learning rate")
    return gradients, norm


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "embedding" not in name
