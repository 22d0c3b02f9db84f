"""The scalars of the optimizers: exact round trips, and no state that no optimizer could be in."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import AdamOptions, AdamState, AdamWOptions, ModelConfig, MuonOptions, StepState
from artifacts.optimizer_state import scalars_from_json, scalars_json
from tests.artifacts.checkpoints import adam_state, adamw_state, muon_state

NAMES = ("adam", "adamw", "muon")


def test_adam_keeps_float32():
    options = AdamOptions(learning_rate=0.01)
    assert options.learning_rate == float(np.float32(0.01)) == 0.009999999776482582
    assert (options.beta1, options.beta2) == (0.8999999761581421, 0.9990000128746033)
    assert options.epsilon == 9.99999993922529e-09


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.0},
        {"learning_rate": -1.0},
        {"learning_rate": float("nan")},
        {"learning_rate": 1e-60},
        {"learning_rate": "1"},
        {"learning_rate": True},
        {"epsilon": 1e39},
        {"maximum_gradient_norm": float("inf")},
        {"maximum_gradient_norm": 10**400},
        {"beta1": 1.0},
        {"beta2": 1 - 1e-12},
        {"beta1": 0.0},
        {"state_storage": "disk"},
        {"page_size": 0},
        {"page_size": 1.0},
    ],
)
def test_settings_that_adam_refuses_are_refused(change):
    with pytest.raises((TypeError, ValueError), match=next(iter(change))):
        AdamOptions(**change)


def powers(step: int, first: float, second: float) -> AdamState:
    return AdamState(AdamOptions(), step, first, second)


def test_powers_are_those_of_the_step_but_for_rounding():
    first, second = AdamOptions().beta1 ** 1000, AdamOptions().beta2 ** 1000
    product = 1.0
    for _ in range(1000):
        product *= AdamOptions().beta1
    assert powers(1000, product, second).beta1_power == product
    powers(1000, first * (1 + 9e-13), second * (1 - 9e-13))
    for wrong in (
        first * (1 + 2e-12),
        first * (1 - 2e-12),
        float("nan"),
        -first,
        AdamOptions().beta1 ** 1001,
    ):
        with pytest.raises(ValueError, match="beta1_power"):
            powers(1000, wrong, second)
    with pytest.raises(ValueError, match="beta2_power"):
        powers(1000, first, first)


def test_powers_below_the_smallest_normal_number_are_any_small_number():
    second = AdamOptions().beta2 ** 10_000
    for tiny in (0.0, 5e-324, 2.0**-1022):
        powers(10_000, tiny, second)
    for wrong in (2.0**-1021, -5e-324):
        with pytest.raises(ValueError, match="beta1_power"):
            powers(10_000, wrong, second)
    assert adam_state(2**64 - 1).beta2_power == 0.0


@pytest.mark.parametrize(
    ("step", "error"), [(-1, ValueError), (2**64, ValueError), (True, TypeError), (1.0, TypeError)]
)
def test_steps_that_adam_cannot_count_are_refused(step, error):
    with pytest.raises(error, match="step_count"):
        powers(step, 1.0, 1.0)


def test_powers_must_be_floats():
    assert powers(0, 1.0, 1.0).step_count == 0
    with pytest.raises(TypeError, match="beta1_power"):
        powers(0, 1, 1.0)
    with pytest.raises(TypeError, match="options"):
        AdamState({}, 0, 1.0, 1.0)  # type: ignore[arg-type]


RATES = st.floats(0, exclude_min=True, allow_infinity=False)
FRACTIONS = st.floats(0, 1, exclude_min=True, exclude_max=True)


@given(
    rates=st.tuples(RATES, RATES, RATES, RATES),
    fractions=st.tuples(FRACTIONS, FRACTIONS, FRACTIONS),
    decay=st.floats(0, allow_infinity=False),
    step=st.integers(0, 2**64 - 1),
)
def test_settings_of_adamw_and_muon_are_kept_to_the_last_bit(rates, fractions, decay, step):
    settings = {"learning_rate": rates[0], "epsilon": rates[1], "maximum_gradient_norm": rates[2]}
    settings |= {"beta1": fractions[0], "beta2": fractions[1], "weight_decay": decay}
    adamw = AdamWOptions(**settings)
    muon = MuonOptions(**settings, matrix_learning_rate=rates[3], momentum=fractions[2])
    assert {name: getattr(muon, name) for name in settings} == settings
    assert math.copysign(1, adamw.weight_decay) == 1
    for options in (adamw, muon):
        state = StepState(options, step)
        assert scalars_from_json(scalars_json(state), NAMES, set()) == state


@pytest.mark.parametrize("state", [adam_state(5), adamw_state(5), muon_state(5)])
def test_scalars_name_their_optimizer_and_come_back_as_that_one(state):
    value = scalars_json(state)
    assert value["type"] == state.name
    assert scalars_from_json(value | {"scope": "model"}, (state.name,), {"scope"}) == state
    others = tuple(name for name in NAMES if name != state.name)
    for change, names in (({}, others), ({"type": [state.name]}, NAMES), ({"type": True}, NAMES)):
        with pytest.raises(ValueError, match="optimizer type must be"):
            scalars_from_json(value | change, names, set())
    for change in ({"extra": 1}, {"step_count": -1}, {"step_count": 1.0}, {"options": {}}, {"options": []}):
        with pytest.raises((TypeError, ValueError)):
            scalars_from_json(value | change, NAMES, set())


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.0},
        {"learning_rate": math.inf},
        {"learning_rate": "1"},
        {"learning_rate": 10**400},
        {"weight_decay": -0.1},
        {"weight_decay": math.nan},
        {"weight_decay": False},
        {"weight_decay": None},
        {"beta1": 1.0},
        {"beta2": 0.0},
        {"epsilon": 0.0},
        {"maximum_gradient_norm": -1.0},
        {"matrix_learning_rate": 0.0},
        {"momentum": 1.0},
        {"momentum": True},
    ],
)
def test_settings_that_adamw_and_muon_refuse_are_refused(change):
    with pytest.raises((TypeError, ValueError), match=next(iter(change))):
        replace(muon_state().options, **change)
    if change.keys().isdisjoint({"matrix_learning_rate", "momentum"}):
        with pytest.raises((TypeError, ValueError), match=next(iter(change))):
            replace(adamw_state().options, **change)


def test_states_of_other_settings_or_steps_are_refused():
    with pytest.raises(TypeError, match="options"):
        StepState(AdamOptions(), 0)
    for step, error in ((-1, ValueError), (2**64, ValueError), (True, TypeError), (1.0, TypeError)):
        with pytest.raises(error, match="step_count"):
            adamw_state(step)


def test_only_matrices_of_blocks_go_without_a_second_moment_and_only_under_muon():
    specs = ModelConfig(5, 4, 6, 2, 2, 7).parameter_specs()
    assert adam_state().with_second_moments(specs) == adamw_state().with_second_moments(specs) == specs
    kept = {spec.name for spec in muon_state().with_second_moments(specs)}
    projections = ("query", "key", "value", "output", "expand", "project")
    without = {spec.name for spec in specs} - kept
    assert without == {
        spec.name for spec in specs if spec.name.endswith(tuple(f"{p}.weight" for p in projections))
    }
    assert len(without) == 12
