"""Full sharding (FSDP2): each rank holds a part of weights, gradients and moments, and gathers a block's
weights for as long as it computes with them.

The caller's model stays whole, on the CPU, and sits out the training: a twin of it on the ranks' devices is
sharded and trained. Checkpoints are written from the whole model and read into it, so they are those of one
process, and at the end it takes over the twin's values.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from artifacts import ParameterSpec
from artifacts.arrays import Floats
from riftco.config import PostTrainingConfig, PretrainingConfig
from riftco.model import DecoderOnlyTransformer, ModelOptimizer, OptimizerState
from riftco.training.batches import TrainingBatch
from riftco.training.loop import loss_shares
from riftco.training.optimizers import build_optimizer
from riftco.training.ranks import Ranks
from riftco.training.sharded_optimizers import ShardedOptimizer, local

Config = PretrainingConfig | PostTrainingConfig


class ShardedModel:
    """A model's sharded twin in training, and the ways between the two."""

    def __init__(
        self,
        whole: DecoderOnlyTransformer,
        parameters: Mapping[str, nn.Parameter],
        config: Config,
        ranks: Ranks,
    ) -> None:
        """Moves `whole` to the CPU. `parameters` are those of it that are trained."""
        self.whole, self.parameters = whole.move_to("cpu"), parameters
        self._config, self._ranks = config, ranks
        self.twin = _twin(whole, ranks)
        # Asked for now: after a forward the module shows gathered ones in their place.
        self._shards: dict[str, Any] = dict(self.twin.named_parameters())
        self.optimizer = ShardedOptimizer({n: self._shards[n] for n in parameters}, config, ranks)

    def accumulate(self, model: DecoderOnlyTransformer, batches: Sequence[TrainingBatch]) -> Tensor:
        """As `Ranks.accumulate`, with one pass for each batch, as every rank has to join in every pass."""
        total = sum(batch.counted for batch in batches)
        loss = torch.zeros((), device=model.device)
        for batch in batches:
            rows = self._ranks.rows(batch)
            if rows is None:  # nothing of it counts, but the others wait for this rank in each block
                mine = slice(self._ranks.rank, None, self._ranks.size)
                idle = TrainingBatch(batch.inputs[mine], batch.targets[mine])
                share = 0.0 * next(loss_shares(model, idle, total))
            else:
                (share,) = loss_shares(model, rows, total, cut=False)
            share.backward()
            loss += share.detach()
        self._ranks.sum(loss)
        return loss

    @contextmanager
    def whole_optimizer(self) -> Iterator[ModelOptimizer]:
        """A fresh optimiser over the whole model, on the CPU."""
        with build_optimizer(self.parameters, self._config) as optimizer:
            yield optimizer

    def state(self) -> OptimizerState | None:
        """The run as one process has it, for the leader; all ranks take part, and the others get None."""
        state = self.optimizer.inner.state()
        trained = [self._shards[name] for name in self.parameters]
        parts = (state.values, state.first_moments, state.second_moments)
        gathered = [self._gathered(part, trained) for part in parts]
        if not self._ranks.leader:
            return None
        specs = tuple(ParameterSpec(name, tuple(p.shape)) for name, p in self.parameters.items())
        return OptimizerState(state.scalars, specs, *gathered)

    @torch.no_grad()
    def load(self, state: OptimizerState) -> None:
        """Take over the whole model's values, and this rank's part of the state of its optimiser."""
        for name, parameter in self.whole.named_parameters():
            local(self._shards[name]).copy_(_part(parameter.detach(), self._ranks))
        specs = self.optimizer.inner.state().parameters
        names = {spec.name for spec in specs}

        def parts(flat: Floats) -> Floats:
            pieces, at = [], 0
            for name, parameter in self.parameters.items():
                piece = torch.tensor(flat[at : at + parameter.numel()]).view(parameter.shape)
                at += parameter.numel()
                if name in names:
                    pieces.append(_part(piece, self._ranks).flatten())
            return torch.cat(pieces).numpy()

        arrays = (parts(state.values), parts(state.first_moments), parts(state.second_moments))
        self.optimizer.inner.load_state(OptimizerState(state.scalars, specs, *arrays))

    @torch.no_grad()
    def finish(self) -> None:
        """Give the trained values to the whole model, on every rank."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self._shards[name].full_tensor().cpu())

    def _gathered(self, flat: Floats, trained: Sequence[nn.Parameter]) -> Floats:
        """This rank's parts of flat arrays joined to whole ones; empty on all ranks but the leader."""
        from torch.distributed.tensor import DTensor

        at, found = 0, []
        for parameter in trained:
            assert isinstance(parameter, DTensor)
            shape = parameter.to_local().shape
            local = torch.tensor(flat[at : at + shape.numel()], device=self._ranks.device).view(shape)
            at += shape.numel()
            mesh, placements, strides = parameter.device_mesh, parameter.placements, parameter.stride()
            whole = DTensor.from_local(local, mesh, placements, shape=parameter.shape, stride=strides)
            values = whole.full_tensor()
            if self._ranks.leader:
                found.append(values.flatten().numpy(force=True))
        return np.concatenate(found) if found else np.empty(0, np.float32)


def _twin(whole: DecoderOnlyTransformer, ranks: Ranks) -> DecoderOnlyTransformer:
    """Another model of equal values and policies on the ranks' devices, block by block in shards."""
    from torch.distributed.device_mesh import init_device_mesh  # these import torch's compiler, 3 s
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    twin = DecoderOnlyTransformer(whole.config)
    if whole.lora is not None:
        twin.attach_lora(whole.lora)
    twin.attention, twin.activation_checkpointing = whole.attention, whole.activation_checkpointing
    twin.precision = whole.precision
    with torch.no_grad():
        for own, theirs in zip(twin.parameters(), whole.parameters(), strict=True):
            own.copy_(theirs)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for module in (*twin.blocks, twin):
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # sums, where FSDP averages
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply on the way
    register_fsdp_forward_method(twin, "hidden")
    return twin


def _part(whole: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows of a tensor, as FSDP deals them out."""
    parts = whole.chunk(ranks.size)
    return parts[ranks.rank] if ranks.rank < len(parts) else whole[:0]
