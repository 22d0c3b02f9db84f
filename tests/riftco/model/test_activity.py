"""The contract's table of locks, cell by cell, and what counts as alive."""

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from riftco.model import Adam, DecoderOnlyTransformer, LoraConfig, OptimizerState, next_token_loss
from riftco.serving import DecodeSession

IDS = torch.tensor([[3, 1, 4, 1, 5]])
Model = DecoderOnlyTransformer

BUSY: dict[str, tuple[Callable[[Model], Any], str]] = {
    "graph": (lambda model: model(IDS), "a graph of the model is alive"),
    "loss": (lambda model: next_token_loss(model, IDS, IDS), "a graph of the model is alive"),
    "base optimizer": (lambda model: Adam(model.base_parameters()), "an optimizer is alive"),
    "adapter optimizer": (lambda model: Adam(model.adapter_parameters()), "an optimizer is alive"),
    "base list": (lambda model: model.base_parameters(), "a list of its base parameters is alive"),
    "adapter list": (lambda model: model.adapter_parameters(), "a list of its adapter parameters is alive"),
    "session": (lambda model: DecodeSession(model), "a decode session is open"),
    "nothing": (lambda model: None, ""),
}
"""States of a live model: how to get into one, and what is said of it."""

DENSE, ADAPTED, PACKED = "dense", "adapted", "packed"
OPERATIONS: dict[str, tuple[str, Callable[[Model], Any], set[str]]] = {
    "move the model": (DENSE, lambda model: model.double(), {"graph", "loss", "base optimizer", "session"}),
    "load parameter values": (
        DENSE,
        lambda model: model.load_base_values(values(model)),
        {"graph", "loss", "base optimizer", "session"},
    ),
    "load frozen base values": (
        ADAPTED,
        lambda model: model.load_base_values(values(model)),
        {"graph", "loss", "base optimizer", "session"},
    ),
    "attach LoRA": (
        DENSE,
        lambda model: model.attach_lora(LoraConfig(rank=2)),
        {"graph", "loss", "base optimizer", "session"},
    ),
    "quantize the model": (
        DENSE,
        lambda model: model.quantize_nf4(),
        {"graph", "loss", "base optimizer", "base list", "session"},
    ),
    "load packed state": (
        PACKED,
        lambda model: model.load_packed_state(model.packed_state()),
        {"graph", "loss", "session"},
    ),
    "merge LoRA": (
        PACKED,
        lambda model: model.merge_lora(),
        {"graph", "loss", "base optimizer", "adapter optimizer", "adapter list", "session"},
    ),
    "take a step": (ADAPTED, lambda model: adam_with_gradients(model).step(), {"session"}),
    "capture the optimizer's state": (
        ADAPTED,
        lambda model: Adam(model.adapter_parameters()).state(),
        {"graph", "loss"},
    ),
    "load an optimizer's state": (
        ADAPTED,
        lambda model: Adam(model.adapter_parameters()).load_state(state_of_a_twin(model)),
        {"graph", "loss", "session"},
    ),
}
"""On what model, what is done, and in which states it is refused."""

FREE: dict[str, Callable[[Model], Any]] = {
    "forward": lambda model: model(IDS),
    "loss": lambda model: next_token_loss(model, IDS, IDS),
    "Adam": lambda model: Adam(model.adapter_parameters()),
    "zero gradients": lambda model: Adam(model.adapter_parameters()).zero_gradients(),
    "base list": lambda model: model.base_parameters(),
    "adapter list": lambda model: model.adapter_parameters(),
    "session": lambda model: DecodeSession(model),
    "attention kind": lambda model: setattr(model, "attention", "flash"),
    "checkpointing kind": lambda model: setattr(model, "activation_checkpointing", "block"),
}


def values(model: Model) -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(parameter) for name, parameter in model.base_parameters().items()}


def adam_with_gradients(model: Model) -> Adam:
    adam = Adam(model.adapter_parameters())
    for parameter in adam.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    return adam


def state_of_a_twin(model: Model) -> OptimizerState:
    return Adam(prepared(Model(model.config), ADAPTED).adapter_parameters()).state()


def prepared(model: Model, kind: str) -> Model:
    if kind == PACKED:
        model.quantize_nf4()
    if kind != DENSE:
        model.attach_lora(LoraConfig(rank=2))
    return model


CELLS = [
    (name, state)
    for name, (kind, _, _) in OPERATIONS.items()
    for state in BUSY
    if kind != DENSE or not state.startswith("adapter")
]


@pytest.mark.parametrize(("name", "state"), CELLS)
def test_each_operation_is_refused_in_exactly_these_states(model: Model, name: str, state: str) -> None:
    kind, operate, refusals = OPERATIONS[name]
    prepared(model, kind)
    enter, message = BUSY[state]
    holder = enter(model)
    refusal = pytest.raises(ValueError, match=f"^cannot {name} while {message}")
    with refusal if state in refusals else nullcontext():
        operate(model)
    del holder
    if state in refusals:
        operate(model)  # what is gone is no obstacle


@pytest.mark.parametrize("operation", FREE)
@pytest.mark.parametrize("state", BUSY)
def test_everything_else_is_free_in_every_state(model: Model, state: str, operation: str) -> None:
    prepared(model, PACKED)
    holder = BUSY[state][0](model)
    FREE[operation](model)
    del holder


def test_below_adapters_values_are_loaded_beside_no_other_optimizer(model: Model) -> None:
    prepared(model, ADAPTED)
    own = Adam(model.adapter_parameters())
    model.load_base_values(values(model))
    assert float(model.language_model_head.bias[0].detach()) == 1
    part = Adam(dict(list(model.adapter_parameters().items())[:1]))
    model.activity.register("optimizer", part)
    with pytest.raises(ValueError, match="cannot load frozen base values while an optimizer"):
        model.load_base_values(values(model))
    model.activity.release(own)
    with pytest.raises(ValueError, match="cannot load frozen base values while an optimizer"):
        model.load_base_values(values(model))


def test_a_refused_operation_changes_nothing(model: Model) -> None:
    prepared(model, PACKED)
    before = [weight.encode() for weight in model.packed_state()]
    with DecodeSession(model), pytest.raises(ValueError, match="cannot merge LoRA while a decode session"):
        model.merge_lora()
    assert [weight.encode() for weight in model.packed_state()] == before
    assert model.quantized
    assert model.lora is not None


def test_gradients_wait_for_a_step_even_if_they_are_zero(model: Model) -> None:
    adam = Adam(model.base_parameters())
    state = adam.state()
    (next_token_loss(model, IDS, IDS) * 0).backward()
    for operate in (adam.state, lambda: adam.load_state(state)):
        with pytest.raises(ValueError, match="optimizer's state while gradients"):
            operate()
    adam.zero_gradients()
    adam.load_state(adam.state())


@pytest.mark.parametrize("freeze", [lambda m: m.attach_lora(LoraConfig(rank=2)), lambda m: m.quantize_nf4()])
def test_what_is_frozen_keeps_no_gradient(model: Model, freeze: Callable[[Model], Any]) -> None:
    next_token_loss(model, IDS, IDS).backward()
    freeze(model)
    assert all(p.grad is None and not p.requires_grad for p in model.base_parameters().values())


def test_holders_are_released_once_and_for_all_kinds(model: Model) -> None:
    class Holder:
        pass

    holder, other = Holder(), Holder()
    for kind in ("optimizer", "session"):
        model.activity.register(kind, holder)
    model.activity.register("session", other)
    model.activity.release(holder)
    model.activity.release(holder)
    assert (model.activity.holders("optimizer"), model.activity.holders("session")) == ([], [other])


def test_a_session_keeps_the_model_and_frees_it(model: Model) -> None:
    session = DecodeSession(model)
    activity = model.activity
    assert activity.holders("session") == [session]
    session.close()
    session.close()
    assert activity.holders("session") == []
    model.quantize_nf4()


def test_nothing_keeps_a_model_that_is_no_longer_referred_to(model: Model) -> None:
    gc.disable()
    try:
        ended = threading.Event()
        other = Model(model.config)
        other.attach_lora(LoraConfig(rank=2))
        other.adapter_parameters().close()
        next_token_loss(other, IDS, IDS).backward()
        other._at_end = SetAtEnd(ended)
        del other
        assert ended.is_set()
    finally:
        gc.enable()


class SetAtEnd:
    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def __del__(self) -> None:
        self.event.set()


def test_models_do_not_lock_each_other(model: Model) -> None:
    other = Model(model.config)
    with DecodeSession(other):
        model.quantize_nf4()


def test_the_lock_is_the_models_own_and_re_entrant(model: Model) -> None:
    with model.activity.lock:
        model.attach_lora(LoraConfig(rank=2))
        done = threading.Thread(target=model.merge_lora)
        done.start()
        done.join(0.05)
        assert done.is_alive()
    done.join()
    assert model.lora_merged


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_live_model_is_not_copied(model: Model, duplicate: Callable[[Model], Any]) -> None:
    with pytest.raises(TypeError, match="cannot be copied"):
        duplicate(model)


def test_a_move_to_the_same_backend_is_none(model: Model) -> None:
    with DecodeSession(model):
        assert model.move_to("cpu") is model
