"""Adam (Kingma & Ba 2014) by the contract: float64 arithmetic, global-norm clipping, all or nothing."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from artifacts import AdamOptions, AdamState, OptimizerScalars
from kernels import adam_step
from riftco.model.optimizer import AdamStepStats, ModelOptimizer


class Adam(ModelOptimizer):
    """Settings are rounded to float32 and widened again. With g the clipped gradient:

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        theta -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    all in float64 with the unrounded m and v; only the stored state is float32. Each parameter's moments lie
    in one tensor (`state_storage` "contiguous") or in pages of at most `page_size` elements ("paged"), with
    the same result bit for bit. ValueError for a setting that is not finite and above 0, or a beta of 1.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        learning_rate: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        maximum_gradient_norm: float = 1.0,
        state_storage: str = "contiguous",
        page_size: int = 4096,
    ) -> None:
        self.options = AdamOptions(
            learning_rate, beta1, beta2, epsilon, maximum_gradient_norm, state_storage, page_size
        )
        super().__init__(parameters)
        self.learning_rate = self.options.learning_rate
        self.beta1_power = self.beta2_power = 1.0
        # The same tensors for life: the kernel knows those that it wrote last by what they are.
        self._first_pages = [self._pages(parameter) for parameter in self.parameters.values()]
        self._second_pages = [self._pages(parameter) for parameter in self.parameters.values()]

    @property
    def state_storage(self) -> str:
        """Where moments lie, as asked for."""
        return self.options.state_storage

    @property
    def state_page_count(self) -> int:
        """Sum of ceil(count / page_size) over the parameters; 0 if contiguous."""
        return sum(map(len, self._first_pages)) if self.state_storage == "paged" else 0

    @property
    def first_moments(self) -> Tensor:
        """A copy of all m, flat, in parameter order."""
        return torch.cat([page for pages in self._first_pages for page in pages])

    @property
    def second_moments(self) -> Tensor:
        """A copy of all v, flat, in parameter order."""
        return torch.cat([page for pages in self._second_pages for page in pages])

    def _pages(self, parameter: nn.Parameter) -> list[Tensor]:
        count = parameter.numel()
        size = self.options.page_size if self.options.state_storage == "paged" else count
        starts = range(0, count, size)
        return [torch.zeros(min(size, count - start), device=parameter.device) for start in starts]

    def _update(self, gradients: dict[str, Tensor]) -> AdamStepStats:
        options = self.options
        beta1_power, beta2_power = self.beta1_power * options.beta1, self.beta2_power * options.beta2
        norm, clip = adam_step(
            list(self.parameters.values()),
            list(gradients.values()),
            self._first_pages,
            self._second_pages,
            beta1_power=beta1_power,
            beta2_power=beta2_power,
            learning_rate=self.learning_rate,
            beta1=options.beta1,
            beta2=options.beta2,
            epsilon=options.epsilon,
            maximum_gradient_norm=options.maximum_gradient_norm,
        )
        self.beta1_power, self.beta2_power = beta1_power, beta2_power
        self.step_count += 1
        return AdamStepStats(self.step_count, norm, clip)

    def _first(self) -> list[list[Tensor]]:
        return self._first_pages

    def _second(self) -> list[list[Tensor]]:
        return self._second_pages

    def _scalars(self) -> AdamState:
        return AdamState(self.options, self.step_count, self.beta1_power, self.beta2_power)

    def _set_scalars(self, scalars: OptimizerScalars) -> None:
        assert isinstance(scalars, AdamState)
        self.step_count = scalars.step_count
        self.beta1_power, self.beta2_power = scalars.beta1_power, scalars.beta2_power

    def _drop(self) -> None:
        self._first_pages, self._second_pages = [], []
