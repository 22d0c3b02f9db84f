"""What all optimisers promise beside their rule: all or nothing, a life, locks, and a state that is exact."""

import copy
import gc
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from artifacts import AdamOptions, AdamState
from riftco.model import Adam, DecoderOnlyTransformer, LoraConfig, ModelOptimizer
from riftco.serving import DecodeSession
from riftco.training.adamw import AdamW
from riftco.training.muon import Muon

Build = Callable[[Mapping[str, nn.Parameter]], ModelOptimizer]
HIDDEN = "blocks.0.attention.query.weight"
BUILDS: dict[str, Build] = {
    "adam": lambda parameters: Adam(parameters, 0.01),
    "paged adam": lambda parameters: Adam(parameters, 0.01, state_storage="paged", page_size=3),
    "adamw": lambda parameters: AdamW(parameters, 0.01, weight_decay=0.1),
    "muon": lambda parameters: Muon(parameters, 0.01, matrix_learning_rate=0.02, weight_decay=0.1),
}
SHAPES = {
    "token_embedding.weight": (5, 4),
    HIDDEN: (4, 4),
    "blocks.0.attention.query.bias": (4,),
    "head": (3, 4),
}
each = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def step(optimizer: ModelOptimizer, number: int) -> None:
    for i, p in enumerate(optimizer.parameters.values()):
        p.grad = torch.sin(torch.arange(p.numel()) * (i + 1.3) + number).view_as(p)
    optimizer.step()


def after(build: Build, steps: int, seed: int = 0) -> ModelOptimizer:
    optimizer = build(parameters(seed))
    for number in range(steps):
        step(optimizer, number)
    return optimizer


def bytes_of(optimizer: ModelOptimizer) -> tuple[object, ...]:
    state = optimizer.state()
    arrays = (state.values, state.first_moments, state.second_moments)
    return (state.scalars, optimizer.step_count, *(array.tobytes() for array in arrays))


@each
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_at_any_place_changes_no_byte(
    build: Build, name: str, value: float
) -> None:
    optimizer = after(build, 2)
    before = bytes_of(optimizer)
    for place in range(optimizer.parameters[name].numel()):
        for p in optimizer.parameters.values():
            p.grad = torch.ones_like(p)
        gradient = optimizer.parameters[name].grad
        assert gradient is not None
        gradient.view(-1)[place] = value
        poisoned = {n: p.grad.clone() for n, p in optimizer.parameters.items() if p.grad is not None}
        with pytest.raises(ValueError, match="nothing was updated"):
            optimizer.step()
        for n, p in optimizer.parameters.items():
            assert p.grad is not None
            assert torch.equal(p.grad.nan_to_num(7.0), poisoned[n].nan_to_num(7.0))
        optimizer.zero_gradients()
        assert bytes_of(optimizer) == before


@each
def test_a_missing_gradient_is_refused_by_name_and_changes_no_byte(build: Build) -> None:
    optimizer = after(build, 1)
    before = bytes_of(optimizer)
    for name in SHAPES:
        for p in optimizer.parameters.values():
            p.grad = torch.ones_like(p)
        optimizer.parameters[name].grad = None
        with pytest.raises(ValueError, match=f"{name} has no gradient"):
            optimizer.step()
        optimizer.zero_gradients()
        assert bytes_of(optimizer) == before


@each
def test_coordinates_with_zero_gradient_stay_put_for_500_steps(build: Build) -> None:
    """Of AdamW and Muon, those that neither decay nor the orthogonal update moves on purpose."""
    optimizer = build(parameters())
    still = {name: torch.arange(p.numel()).view(p.shape) < 3 for name, p in optimizer.parameters.items()}
    if not isinstance(optimizer, Adam):
        del still[HIDDEN], still["head"]
    start = {name: optimizer.parameters[name].detach()[mask].clone() for name, mask in still.items()}
    for number in range(500):
        for i, (name, p) in enumerate(optimizer.parameters.items()):
            p.grad = torch.cos(torch.arange(p.numel()) * (i + 1.1) + number).view_as(p)
            if name in still:
                p.grad[still[name]] = 0.0
        optimizer.step()
    for name, mask in still.items():
        assert torch.equal(optimizer.parameters[name].detach()[mask], start[name])
        assert not torch.equal(optimizer.parameters[name].detach(), parameters()[name])


@each
@pytest.mark.parametrize("kept", [0, 1, 5])
def test_a_state_loaded_into_another_goes_on_to_the_last_bit(build: Build, kept: int) -> None:
    whole = after(build, 8)
    other = after(build, 3, seed=1)
    other.load_state(after(build, kept).state())
    for number in range(kept, 8):
        step(other, number)
    assert bytes_of(other) == bytes_of(whole)


@each
def test_a_state_is_a_copy_and_taking_it_changes_nothing(build: Build) -> None:
    optimizer = after(build, 2)
    before = bytes_of(optimizer)
    state = optimizer.state()
    assert bytes_of(optimizer) == before
    step(optimizer, 2)
    assert (state.scalars, state.scalars.step_count, state.values.tobytes()) == (before[0], 2, before[2])
    optimizer.load_state(state)
    assert bytes_of(optimizer) == before
    state.values[0] += 1
    assert bytes_of(optimizer) == before


@each
def test_a_loaded_state_leaves_the_rate_that_a_schedule_set(build: Build) -> None:
    optimizer = after(build, 1)
    optimizer.learning_rate = 0.005
    state = optimizer.state()
    assert state.scalars.options == optimizer.options  # type: ignore[attr-defined]
    optimizer.load_state(state)
    assert optimizer.learning_rate == 0.005


@each
def test_states_that_do_not_fit_are_refused_by_what_differs_and_change_nothing(build: Build) -> None:
    optimizer = after(build, 2)
    before, state = bytes_of(optimizer), optimizer.state()
    scalars = state.scalars
    renamed = (replace(state.parameters[0], name="x"), *state.parameters[1:])
    reshaped = (replace(state.parameters[0], shape=(4, 5)), *state.parameters[1:])
    faster = replace(scalars, options=replace(scalars.options, learning_rate=0.5))
    another = after(BUILDS["muon" if isinstance(optimizer, AdamW) else "adamw"], 1).state()
    for wrong, message in [
        (replace(state, parameters=renamed), r"x \[5, 4\] against token_embedding"),
        (replace(state, parameters=reshaped), r"token_embedding.weight \[4, 5\] against"),
        (replace(state, parameters=state.parameters[:-1]), r"none against head \[3, 4\]"),
        (replace(state, scalars=faster), "learning_rate 0.5"),
        (another, "build that one"),
        (replace(state, values=state.values[:-1]), r"float32 \[52\]"),
        (replace(state, first_moments=state.first_moments.astype(np.float64)), "got float64"),
        (replace(state, second_moments=np.append(state.second_moments, state.values[:1])), r"float32 \["),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state(wrong)
        assert bytes_of(optimizer) == before
    with pytest.raises(TypeError, match="loads an OptimizerState"):
        optimizer.load_state(scalars)  # type: ignore[arg-type]


def test_pages_and_one_piece_load_each_others_states() -> None:
    paged, contiguous = after(BUILDS["paged adam"], 3), after(BUILDS["adam"], 0, seed=1)
    contiguous.load_state(paged.state())
    step(paged, 3)
    step(contiguous, 3)
    assert bytes_of(paged)[1:] == bytes_of(contiguous)[1:]


@each
def test_the_memory_of_the_moments_is_told(build: Build) -> None:
    optimizer = build(parameters())
    values = sum(math.prod(shape) for shape in SHAPES.values())
    momentum_only = 16 if isinstance(optimizer, Muon) else 0
    assert optimizer.state_payload_bytes == 8 * values - 4 * momentum_only
    paged = isinstance(optimizer, Adam) and optimizer.state_storage == "paged"
    assert optimizer.state_page_count == (7 + 6 + 2 + 4 if paged else 0)
    assert optimizer.state_storage == ("paged" if paged else "contiguous")


@each
def test_a_closed_optimizer_is_of_no_use_and_closing_it_again_is_harmless(build: Build) -> None:
    with after(build, 1) as optimizer:
        state = optimizer.state()
    optimizer.close()
    calls: list[Callable[[], object]] = [optimizer.step, optimizer.zero_gradients, optimizer.state]
    calls += [optimizer.__enter__, lambda: optimizer.load_state(state), lambda: optimizer.require_own(state)]
    calls += [lambda: optimizer.owns_parameters_of(nn.Linear(1, 1)), lambda: optimizer.device]
    for call in calls:
        with pytest.raises(RuntimeError, match="is closed"):
            call()
    assert (optimizer.parameters, optimizer.state_payload_bytes, optimizer.step_count) == ({}, 0, 1)


@each
def test_an_optimizer_cannot_be_copied(build: Build) -> None:
    optimizer = build(parameters())
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(optimizer)


@each
def test_an_optimizer_without_parameters_is_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="at least one parameter"):
        build({})


@each
def test_parameters_are_owned_by_identity_not_equality(build: Build, model: DecoderOnlyTransformer) -> None:
    twin = DecoderOnlyTransformer(model.config)
    optimizer = build(model.base_parameters())
    assert optimizer.owns_parameters_of(model)
    assert not optimizer.owns_parameters_of(twin)
    mixed = dict(model.base_parameters()) | {"final_norm.bias": twin.final_norm.bias}
    assert not build(mixed).owns_parameters_of(model)


@each
def test_an_optimizer_counts_until_it_is_closed_or_gone(build: Build, model: DecoderOnlyTransformer) -> None:
    optimizer = build(model.base_parameters())
    with pytest.raises(ValueError, match="cannot attach LoRA while an optimizer is alive"):
        model.attach_lora(LoraConfig())
    optimizer.close()
    gone = build(model.base_parameters())
    del gone
    gc.collect()
    model.attach_lora(LoraConfig())


@each
def test_refused_settings_leave_no_lock_behind(build: Build, model: DecoderOnlyTransformer) -> None:
    with pytest.raises(ValueError, match="learning_rate") as kept:
        type(build(parameters()))(model.base_parameters(), -1.0, **_rest(build))
    model.attach_lora(LoraConfig())
    assert kept


def _rest(build: Build) -> dict[str, float]:
    optimizer = build(parameters())
    names = {"AdamW": ("weight_decay",), "Muon": ("weight_decay", "matrix_learning_rate")}
    return dict.fromkeys(names.get(type(optimizer).__name__, ()), 0.1)


@each
def test_steps_and_states_keep_away_from_sessions_graphs_and_gradients(
    build: Build, model: DecoderOnlyTransformer
) -> None:
    optimizer = build(model.base_parameters())
    before = optimizer.state()
    with DecodeSession(model):
        model([1, 2]).sum().backward()
        with pytest.raises(ValueError, match="cannot take a step while a decode session"):
            optimizer.step()
        optimizer.zero_gradients()
        optimizer.state()  # may be captured
        with pytest.raises(ValueError, match="cannot load an optimizer's state while a decode session"):
            optimizer.load_state(before)
    loss = model([1, 2]).sum()
    for refused in (optimizer.state, lambda: optimizer.load_state(before)):
        with pytest.raises(ValueError, match=r"cannot (capture|load).* while a graph"):
            refused()
    loss.backward()
    optimizer.step()  # makes the graph stale, and may
    del loss
    for p in optimizer.parameters.values():
        p.grad = torch.zeros_like(p)  # pending, though zero
    for refused in (optimizer.state, lambda: optimizer.load_state(before)):
        with pytest.raises(ValueError, match=r"cannot (capture|load).* while gradients"):
            refused()
    optimizer.zero_gradients()
    optimizer.load_state(before)
    assert optimizer.step_count == 0


def test_adam_goes_on_when_the_powers_of_its_betas_have_vanished() -> None:
    adam = Adam(parameters(), beta1=0.25, beta2=0.5)
    state = adam.state()
    adam.load_state(replace(state, scalars=AdamState(AdamOptions(beta1=0.25, beta2=0.5), 2000, 0.0, 0.0)))
    step(adam, 0)
    assert adam.step_count == 2001
    assert adam.state().scalars.beta1_power == 0.0
