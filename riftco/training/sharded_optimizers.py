"""Adam and AdamW over one rank's shards: the same step as over whole parameters, on all ranks or on none."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernels import NonFiniteUpdateError, adam_step
from kernels.adam.transaction import Bounds, Settings, norm_and_clip
from riftco.config import PostTrainingConfig, PretrainingConfig
from riftco.model import Adam, AdamStepStats, ModelOptimizer
from riftco.training.adamw import AdamW, require_small
from riftco.training.optimizers import state_storage
from riftco.training.ranks import Ranks


class ShardedOptimizer:
    """An optimiser over this rank's shards, which steps if and only if those of all ranks do."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: PretrainingConfig | PostTrainingConfig,
        ranks: Ranks,
    ) -> None:
        self.parameters = dict(parameters)
        locals_ = {n: nn.Parameter(local(p)) for n, p in parameters.items()}
        self._shards = {name: shard for name, shard in locals_.items() if shard.numel()}
        self.inner = _build(self._shards, config, ranks)

    @property
    def learning_rate(self) -> float:
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.inner.learning_rate = value

    @property
    def step_count(self) -> int:
        return self.inner.step_count

    def step(self) -> AdamStepStats:
        """As `ModelOptimizer.step`; the norm is that of the whole gradient."""
        for name, shard in self._shards.items():
            gradient = self.parameters[name].grad
            shard.grad = None if gradient is None else local(gradient)
        stats = self.inner.step()
        self.zero_gradients()
        return stats

    def zero_gradients(self) -> None:
        self.inner.zero_gradients()
        for parameter in self.parameters.values():
            parameter.grad = None


class ShardAdam(Adam):
    """The contract's Adam over one rank's part of each parameter."""

    ranks: Ranks

    def _update(self, gradients: dict[str, Tensor]) -> AdamStepStats:
        """Clipped by the norm over all ranks, and all or nothing over all of them.

        The bounds that settle a sane step are read first; only where some rank's do not are its old values
        kept, until all ranks have taken the step.
        """
        options = self.options
        powers = self.beta1_power * options.beta1, self.beta2_power * options.beta2
        settings = Settings(
            self.learning_rate,
            options.beta1,
            options.beta2,
            options.epsilon,
            options.maximum_gradient_norm,
            *powers,
        )
        own, whole = _squares(gradients, self.ranks)
        norm, clip = norm_and_clip(whole, settings)
        pages = [page for of_one in (*self._first_pages, *self._second_pages) for page in of_one]
        written = [*self.parameters.values(), *pages]
        bounds = Bounds(
            _largest(self.parameters.values()),
            *map(_largest_page, (self._first_pages, self._second_pages)),
        )
        doubtful = not bounds.after(norm * clip, settings).finite
        kept = [x.detach().clone() for x in written] if self.ranks.any(doubtful)[0] else None
        # What makes the kernel, which sees one shard, arrive at the clip of the whole gradient.
        limit = clip * math.sqrt(own) or options.maximum_gradient_norm
        if clip == 1.0:
            limit = options.maximum_gradient_norm
        error = None
        try:
            adam_step(
                list(self.parameters.values()),
                list(gradients.values()),
                self._first_pages,
                self._second_pages,
                **settings._replace(maximum_gradient_norm=limit)._asdict(),
            )
        except ValueError as refusal:
            error = refusal
        if kept is not None and self.ranks.any(error is not None)[0]:
            for old, new in zip(kept, written, strict=True):
                new.detach().copy_(old)
            raise error or NonFiniteUpdateError(
                "an updated value of another rank is not finite; nothing was updated"
            )
        assert error is None, error
        self.beta1_power, self.beta2_power = powers
        self.step_count += 1
        return AdamStepStats(self.step_count, norm, clip)


class ShardAdamW(AdamW):
    """AdamW over one rank's part of each parameter."""

    ranks: Ranks

    def _update(self, gradients: dict[str, Tensor]) -> AdamStepStats:
        norm = math.sqrt(_squares(gradients, self.ranks)[1])
        require_small(norm)
        limit = self.options.maximum_gradient_norm
        clip = limit / norm if norm > limit else 1.0
        if clip < 1.0:
            torch._foreach_mul_(list(gradients.values()), clip)
        stats = super()._update(gradients)  # finds nothing left to clip
        return AdamStepStats(stats.step, norm, clip)


def _build(
    shards: Mapping[str, nn.Parameter], config: PretrainingConfig | PostTrainingConfig, ranks: Ranks
) -> ModelOptimizer:
    optimizer: ShardAdam | ShardAdamW
    if config.optimizer == "adam":
        optimizer = ShardAdam(
            shards,
            config.learning_rate,
            state_storage=state_storage(config),
            page_size=config.optimizer_page_size,
        )
    else:
        optimizer = ShardAdamW(shards, config.learning_rate, weight_decay=config.weight_decay)
    optimizer.ranks = ranks
    return optimizer


def local(sharded: Any) -> Tensor:
    """This rank's part of a `DTensor`, in the same memory."""
    part: Tensor = sharded.to_local()
    return part.detach()


def _squares(gradients: Mapping[str, Tensor], ranks: Ranks) -> tuple[float, float]:
    """The sum of squares of this rank's gradients, and of all ranks'."""
    own = torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum()
    whole = own.clone()
    ranks.sum(whole)
    return own.item(), whole.item()


def _largest_page(pages: Sequence[Sequence[Tensor]]) -> float:
    return _largest(page for of_one in pages for page in of_one)


def _largest(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([tensor.detach().abs().max() for tensor in tensors]).max())
