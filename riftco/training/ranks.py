"""Ranks: the processes that share every batch of one run, each with its part of the rows.

All ranks draw the same whole batches, so the order of the data is that of one process by construction, and
each computes its own rows. Loss and gradients are sums over ranks of shares that are already divided by the
tokens of the whole step, so nothing is averaged and ragged rows weigh as they do in one process.

A process is a rank where torch's launcher says so in the environment (RANK, WORLD_SIZE, MASTER_ADDR); its
GPU is the one that LOCAL_RANK counts.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from riftco.backends import BackendName
from riftco.config import OptimizationConfig
from riftco.errors import InputError
from riftco.model import DecoderOnlyTransformer
from riftco.training.batches import TrainingBatch
from riftco.training.loop import loss_shares

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def is_rank() -> bool:
    """Whether this process is one of the ranks of a run: RANK alone may be another program's."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def is_leader() -> bool:
    """Whether this process speaks for its run: rank 0, or the only one."""
    return not is_rank() or _number("RANK") == 0


def trains_here(config: OptimizationConfig, backend: BackendName) -> bool:
    """Whether this process trains, alone or as a rank, whose GPU it then takes; else it launches ranks.

    InputError for what ranks cannot do, when a launcher started another number of them than configured, and
    when there are fewer GPUs than ranks.
    """
    if config.processes > 1 and backend not in ("cpu", "cuda"):
        raise InputError(f"processes {config.processes} needs backend cpu or cuda, not {backend}")
    if not is_rank():
        if backend == "cuda":
            _require_gpus(config.processes, "processes")
        return config.processes == 1
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if size != config.processes:
        raise InputError(
            f"processes is {config.processes} and the launcher started {size}; make them agree, or unset "
            "RANK if no launcher did"
        )
    if rank >= size:
        raise InputError(f"RANK is {rank} but ranks of WORLD_SIZE {size} count from 0 to {size - 1}")
    if backend == "cuda":
        device = _number("LOCAL_RANK")
        _require_gpus(device + 1, "the launcher's processes on this machine")
        torch.cuda.set_device(device)
    return True


def _number(variable: str) -> int:
    """A number of the launcher's; InputError if it is none."""
    text = os.environ.get(variable, "")
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"{variable} is {text!r}, not a number; start ranks with torchrun, or unset RANK")
    return int(text)


def _require_gpus(count: int, what: str) -> None:
    there = torch.cuda.device_count()
    if count > there:
        raise InputError(f"each rank needs a GPU and this machine has {there}; set {what} to at most that")


class Ranks:
    """The ranks of a run as one of them sees it; every method but `rows` is called by all of them alike."""

    def __init__(self, group: "ProcessGroup", device: torch.device) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.device = device

    @property
    def leader(self) -> bool:
        return self.rank == 0

    def rows(self, batch: TrainingBatch) -> TrainingBatch | None:
        """Rows `rank::size` of a batch; None where they hold nothing to learn."""
        mine = slice(self.rank, None, self.size)
        mask = None if batch.mask is None else batch.mask[mine]
        if mask is not None and not bool(mask.any()):
            return None
        starts = None if batch.document_starts is None else batch.document_starts[mine]
        return TrainingBatch(batch.inputs[mine], batch.targets[mine], mask, starts)

    def accumulate(self, model: DecoderOnlyTransformer, batches: Sequence[TrainingBatch]) -> Tensor:
        """As `riftco.training.loop.accumulate`: the same loss and gradients, to rounding, on every rank.

        A rank with nothing to learn adds zeros.
        """
        total = sum(batch.counted for batch in batches)
        loss = torch.zeros((), device=model.device)
        for rows in filter(None, map(self.rows, batches)):
            for share in loss_shares(model, rows, total):
                share.backward()
                loss += share.detach()
        return self.add_up(loss, [p for p in model.parameters() if p.requires_grad])

    def add_up(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The sum of the ranks' losses; gradients become sums too. One message for all, of equal bits."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), loss.view(1)])
        self.sum(flat)
        *sums, loss = flat.split([*(gradient.numel() for gradient in gradients), 1])
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total.view(parameter.shape)
        return loss.view(())

    def sum(self, values: Tensor) -> None:
        """Replace values on the run's device by their sums over ranks."""
        torch.distributed.all_reduce(values)

    def any(self, *wishes: bool) -> tuple[bool, ...]:
        """For each wish, whether any rank has it."""
        flags = torch.tensor(wishes, dtype=torch.int32, device=self.device)
        self.sum(flags)
        return tuple(bool(flag) for flag in flags.tolist())

    def from_leader(self, data: bytes | None = None) -> bytes:
        """The leader's bytes, on every rank; the others give none."""
        size = torch.tensor([len(data or b"")], device=self.device)
        torch.distributed.broadcast(size, 0)
        # Copied, for torch wants memory that it may write to.
        content = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if len(content):
            torch.distributed.broadcast(content, 0)
        return content.numpy(force=True).tobytes()

    def wait(self) -> None:
        """Until all ranks are here."""
        self.any(False)


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The ranks of this run, over gloo on CPUs and nccl on GPUs; a group that is there already is used."""
    distributed = torch.distributed
    assert is_rank(), "a run of several processes is launched first"
    founded = not distributed.is_initialized()
    if founded:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        group = distributed.group.WORLD
        assert group is not None
        yield Ranks(group, device)
    finally:
        if founded:
            distributed.destroy_process_group()
