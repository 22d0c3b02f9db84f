"""A live run and the checkpoint of it: capture between two steps, validate, restore with rollback.

What is captured is a copy, so training may go on at once. What is restored is applied in a fixed order
(batch source, frozen base values, packed weights, optimiser, Python's generator), and if a part fails, those
before it are put back in reverse.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from artifacts import BatchSourceState, LoraSpec, ParameterSpec, RandomState, TrainingCheckpoint
from artifacts.arrays import Floats
from riftco.config import LoraConfig
from riftco.model import DecoderOnlyTransformer, ModelOptimizer, OptimizerState


class CheckpointSource(Protocol):
    """A batch source that can tell where it stands and go on from there."""

    def checkpoint_state(self) -> BatchSourceState: ...
    def restore_checkpoint_state(self, state: BatchSourceState) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainingCheckpointRestore:
    """What was restored: the checkpoint's id, the caller's count of steps and the optimiser's."""

    checkpoint_id: str
    global_step: int
    optimizer_step: int


def capture(
    model: DecoderOnlyTransformer,
    optimizer: ModelOptimizer,
    *,
    source: object = None,
    global_step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> TrainingCheckpoint:
    """The run between two steps, as one value; nothing of it is changed.

    `global_step` defaults to the optimiser's. TypeError for a source without the two methods of
    `CheckpointSource`; ValueError for an optimiser of another model, or that owns not exactly the adapters
    (the base, without adapters), and while a graph of the model is alive or gradients wait for a step;
    RuntimeError when the model changed while it was read.
    """
    _require_types(model, optimizer)
    _require_owner(model, optimizer)
    source_state = None if source is None else _require_source(source).checkpoint_state()
    if source_state is not None and not isinstance(source_state, BatchSourceState):
        raise TypeError(f"checkpoint_state must return a BatchSourceState, got {source_state!r}")
    with model.activity.lock:
        state = optimizer.state()
        base = _flat(model.base_parameters())
        values = base if model.lora is None else _flat(model.adapter_parameters())
        if not np.array_equal(values, state.values):
            raise RuntimeError("the model changed while it was captured; capture it between two steps")
        return TrainingCheckpoint(
            model.config,
            base,
            optimizer=state.scalars,
            first_moments=state.first_moments,
            second_moments=state.second_moments,
            python_random_state=RandomState.from_python(random.getstate()),
            lora=_spec(model.lora),
            adapter_values=None if model.lora is None else state.values,
            packed_weights=model.packed_state() if model.quantized else None,
            batch_source=source_state,
            global_step=global_step,
            full_sequence_attention=model.attention,
            activation_checkpointing=model.activation_checkpointing,
            metadata=metadata,
        )


def validate(
    checkpoint: TrainingCheckpoint,
    model: DecoderOnlyTransformer,
    optimizer: ModelOptimizer,
    source: object = None,
) -> None:
    """Whether the run can go on from the checkpoint; nothing is changed.

    TypeError or ValueError naming the first thing that differs. Not compared: the seeds of the model and of
    the adapters, where and in what pages moments are stored, the backend, and a source that the checkpoint
    does not have.
    """
    if not isinstance(checkpoint, TrainingCheckpoint):
        raise TypeError(f"checkpoint must be a TrainingCheckpoint, got {type(checkpoint).__name__}")
    _require_types(model, optimizer)
    if not optimizer.owns_parameters_of(model):
        raise ValueError("the optimizer owns parameters of another model; build it from this one")
    seed = model.config.random_seed
    _require_same("model config", replace(checkpoint.config, random_seed=seed), model.config)
    _require_same("full-sequence attention", checkpoint.full_sequence_attention, model.attention)
    _require_same(
        "activation checkpointing", checkpoint.activation_checkpointing, model.activation_checkpointing
    )
    _require_one_backend(model, optimizer)
    _require_same("packed weights", checkpoint.packed_weights is not None, model.quantized)
    _require_same("LoRA adapters", _seedless(checkpoint.lora), _seedless(_spec(model.lora)))
    _require_same("base parameters", checkpoint.parameters, _specs(model.base_parameters()))
    if model.lora is not None:
        _require_same("adapters", checkpoint.adapter_parameters, _specs(model.adapter_parameters()))
    optimizer.require_own(_optimizer_state(checkpoint))
    _require_source_of(checkpoint, source)


def restore(
    checkpoint: TrainingCheckpoint,
    model: DecoderOnlyTransformer,
    optimizer: ModelOptimizer,
    source: object = None,
) -> TrainingCheckpointRestore:
    """Put a run where the checkpoint was captured: the next step is the one that would have followed.

    Sets the values of the model, the optimiser, the source and Python's process-wide generator. Raises what
    `validate` raises, ValueError while a graph or decode session of the model is alive or gradients wait for
    a step, and what a part raises that cannot be applied; everything is then as it was. RuntimeError if it
    cannot be put back: the live state may be indeterminate, so build fresh objects.
    """
    validate(checkpoint, model, optimizer, source)
    with model.activity.lock:
        model.activity.refuse("restore a checkpoint", "graph", "session")
        optimizer.refuse_pending("restore a checkpoint")
        _apply(_parts(checkpoint, model, optimizer, source))
    return TrainingCheckpointRestore(
        checkpoint.checkpoint_id, checkpoint.global_step, checkpoint.optimizer.step_count
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One application step and what puts back the state from before it."""

    apply: Callable[[], None]
    undo: Callable[[], None]


def _parts(
    checkpoint: TrainingCheckpoint,
    model: DecoderOnlyTransformer,
    optimizer: ModelOptimizer,
    source: object,
) -> list[_Part]:
    """The parts in their order; what they were before is read now, before anything is applied."""

    def part(set_: Callable[[Any], None], new: Any, old: Any) -> _Part:
        return _Part(partial(set_, new), partial(set_, old))

    parts = []
    if checkpoint.batch_source is not None:
        live = _require_source(source)
        parts.append(part(live.restore_checkpoint_state, checkpoint.batch_source, live.checkpoint_state()))
    if checkpoint.lora is not None:
        new = {name: torch.tensor(values) for name, values in checkpoint.tensors().items()}
        old = {name: p.detach().clone() for name, p in model.base_parameters().items()}
        parts.append(part(model.load_base_values, new, old))
    if checkpoint.packed_weights is not None:
        parts.append(part(model.load_packed_state, checkpoint.packed_weights, model.packed_state()))
    parts.append(part(optimizer.load_state, _optimizer_state(checkpoint), optimizer.state()))
    parts.append(part(random.setstate, checkpoint.python_random_state.to_python(), random.getstate()))
    return parts


def _apply(parts: list[_Part]) -> None:
    """Apply all parts or none."""
    begun: list[_Part] = []
    try:
        for part in parts:
            begun.append(part)
            part.apply()
    except BaseException as failure:
        if isinstance(failure, Exception):
            begun.pop()  # a part that fails has changed nothing; one that is interrupted may have
        try:
            for part in reversed(begun):
                part.undo()
        except BaseException as error:
            raise RuntimeError(
                "restoring failed and so did putting back what was there: the live state may be "
                "indeterminate. Build a fresh model, optimizer and batch source"
            ) from error
        raise


def _optimizer_state(checkpoint: TrainingCheckpoint) -> OptimizerState:
    values = checkpoint.values if checkpoint.adapter_values is None else checkpoint.adapter_values
    moments = (checkpoint.first_moments, checkpoint.second_moments)
    return OptimizerState(checkpoint.optimizer, checkpoint.trained_parameters, values, *moments)


def _require_types(model: object, optimizer: object) -> None:
    if not isinstance(model, DecoderOnlyTransformer):
        raise TypeError(f"model must be a DecoderOnlyTransformer, got {type(model).__name__}")
    if not isinstance(optimizer, ModelOptimizer):
        raise TypeError(f"optimizer must be Adam, AdamW or Muon, got {type(optimizer).__name__}")


def _require_owner(model: DecoderOnlyTransformer, optimizer: ModelOptimizer) -> None:
    """Raise ValueError unless the optimiser owns exactly what is trained of this very model, in order."""
    if not optimizer.owns_parameters_of(model):
        raise ValueError("the optimizer owns parameters of another model; build it from this one")
    _require_one_backend(model, optimizer)
    scope = "base" if model.lora is None else "adapter"
    whole = model.base_parameters() if model.lora is None else model.adapter_parameters()
    if list(optimizer.parameters) != list(whole):
        raise ValueError(
            f"the optimizer owns {len(optimizer.parameters)} parameters and a checkpoint needs all "
            f"{len(whole)} {scope} parameters in their order; build it from {scope}_parameters()"
        )


def _require_one_backend(model: DecoderOnlyTransformer, optimizer: ModelOptimizer) -> None:
    if optimizer.device != model.device:
        raise ValueError(
            f"the optimizer's state is on {optimizer.device} and the model on {model.device}; "
            "move the model before the optimizer is built"
        )


def _require_source(source: object) -> CheckpointSource:
    for name in ("checkpoint_state", "restore_checkpoint_state"):
        if not callable(getattr(source, name, None)):
            raise TypeError(f"a batch source needs a method {name} for checkpoints, {source!r} has none")
    return source  # type: ignore[return-value]


def _require_source_of(checkpoint: TrainingCheckpoint, source: object) -> None:
    if checkpoint.batch_source is None:
        return
    if source is None:
        raise ValueError("the checkpoint has the position of a batch source; give that source")
    live = _require_source(source).checkpoint_state()
    for name in ("source_type", "fingerprint"):
        _require_same(f"batch source's {name}", getattr(checkpoint.batch_source, name), getattr(live, name))


def _require_same(what: str, stored: object, live: object) -> None:
    if stored != live:
        raise ValueError(f"the checkpoint's {what} is {stored} and the run's {live}; they must be equal")


def _flat(parameters: Mapping[str, nn.Parameter]) -> Floats:
    return torch.cat([parameter.detach().flatten() for parameter in parameters.values()]).numpy(force=True)


def _specs(parameters: Mapping[str, nn.Parameter]) -> tuple[ParameterSpec, ...]:
    return tuple(ParameterSpec(name, tuple(p.shape)) for name, p in parameters.items())


def _spec(lora: LoraConfig | None) -> LoraSpec | None:
    return None if lora is None else LoraSpec(lora.rank, lora.alpha, lora.targets, lora.random_seed)


def _seedless(lora: LoraSpec | None) -> LoraSpec | None:
    return None if lora is None else replace(lora, random_seed=0)
