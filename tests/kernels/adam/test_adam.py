"""Adam's step: the contract's numbers to the bit, and all or nothing, on every implementation."""

import contextlib
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kernels.adam import adam_step, cpu, triton_adam
from kernels.adam.reference import sum_of_squares
from kernels.adam.transaction import Bounds, Settings
from kernels.dispatch import use
from kernels.native import library
from tests.kernels import lab

FAST = ["torch", *(["native"] if library() else [])]
ALL = [*FAST, "triton"]
RATES = {
    "learning_rate": float(np.float32(1e-3)),
    "beta1": float(np.float32(0.9)),
    "beta2": float(np.float32(0.999)),
    "epsilon": float(np.float32(1e-8)),
    "maximum_gradient_norm": 1.0,
}
SHAPES = [(3, 7), (1,), (4097,), (2, 1500), (16, 16)]
LONG = [(2 * 16384 + 13,)]  # more than a thread takes at a time


class State:
    """Parameters, gradients and moments, and the steps done."""

    def __init__(self, shapes=SHAPES, page: int | None = None, size: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(shape) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * size

        self.parameters = [normal(shape) for shape in shapes]
        self.gradients = [normal(shape) for shape in shapes]
        moments = [[normal(p.numel()) for p in self.parameters] for _ in range(2)]
        moments[1] = [v.square() for v in moments[1]]
        self.first, self.second = ([pages(m, page) if page else m for m in of_one] for of_one in moments)
        self.steps = 0

    def step(self, **changes: float) -> tuple[float, float]:
        rates = RATES | changes
        self.steps += 1
        powers = {name + "_power": product(rates[name], self.steps) for name in ("beta1", "beta2")}
        arrays = (self.parameters, self.gradients, self.first, self.second)
        return adam_step(*arrays, **powers, **rates)

    def written(self) -> list[torch.Tensor]:
        return [*self.parameters, *map(whole, self.first), *map(whole, self.second)]


def pages(moment: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [part.clone() for part in moment.split(size)]


def whole(moment) -> torch.Tensor:
    return moment if isinstance(moment, torch.Tensor) else torch.cat(moment)


def product(beta: float, steps: int) -> float:
    power = 1.0
    for _ in range(steps):
        power *= beta
    return power


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.contiguous().numpy().tobytes() for tensor in tensors]


@contextlib.contextmanager
def running(name: str, state: State, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sanitizer is told of the tensors; a launch knows only their addresses."""
    begin = lab._Watch.begin

    def begin_with_tensors(self, kernel: str, arguments: list) -> None:
        begin(self, kernel, [*arguments, *state.parameters, *state.gradients, state.first, state.second])

    with use(name), contextlib.ExitStack() as stack:
        if name == "triton":
            monkeypatch.setattr(lab._Watch, "begin", begin_with_tensors)
            dense = all(gradient.is_contiguous() for gradient in state.gradients)
            stack.enter_context(lab.sanitize() if dense else lab.interpret())
        yield


def definition(state: State, **changes: float) -> tuple[float, list[np.ndarray]]:
    """The contract with numpy's float64: the norm, and new parameters and moments."""
    r = RATES | changes
    norm = math.sqrt(math.fsum(float(x) ** 2 for g in state.gradients for x in g.flatten().tolist()))
    clip = r["maximum_gradient_norm"] / norm if norm > r["maximum_gradient_norm"] else 1.0
    p1, p2 = product(r["beta1"], state.steps + 1), product(r["beta2"], state.steps + 1)
    arrays = []
    for theta, g, m, v in zip(state.parameters, state.gradients, state.first, state.second, strict=True):
        g, m, v = (whole(x).flatten().numpy().astype(np.float64) for x in (g, m, v))
        g = clip * g
        m = r["beta1"] * m + (1 - r["beta1"]) * g
        v = r["beta2"] * v + (1 - r["beta2"]) * g * g
        update = r["learning_rate"] * (m / (1 - p1)) / (np.sqrt(v / (1 - p2)) + r["epsilon"])
        arrays.append((theta.flatten().numpy().astype(np.float64) - update, m, v))
    return norm, [column.astype(np.float32) for of_kind in zip(*arrays, strict=True) for column in of_kind]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1.0, 1e-5, 1e-30, 1e15])
def test_steps_are_those_of_the_contract(name: str, size: float, monkeypatch) -> None:
    state = State(SHAPES[:3] if name == "triton" else SHAPES + LONG, size=size)
    with running(name, state, monkeypatch):
        for _ in range(1 if name == "triton" else 3):
            norm, expected = definition(state)
            found, clip = state.step()
            assert found == pytest.approx(norm, rel=1e-14)
            assert clip == (1.0 / found if found > 1 else 1.0)
            assert bits([tensor.flatten() for tensor in state.written()]) == [x.tobytes() for x in expected]
            state.gradients = [g.flip(0) for g in state.gradients]


@pytest.mark.parametrize("name", ALL)
def test_pages_of_any_size_give_the_same(name: str, monkeypatch) -> None:
    shapes = [(3, 7), (4097,)] + ([] if name == "triton" else LONG)
    expected = State(shapes)
    with use("torch"):
        stats = expected.step()
    for size in (7, 1000, 4096, 20_000):
        if name == "triton" and size == 7:
            continue
        state = State(shapes, page=size)
        with running(name, state, monkeypatch):
            assert state.step() == stats
        assert bits(state.written()) == bits(expected.written())
        monkeypatch.undo()


def test_what_is_measured_on_a_gpu_is_exact(monkeypatch) -> None:
    state = State([(3, 7), (4097,)], page=1030)
    state.parameters[1][-1], state.first[1][-1][-1] = -50.0, -60.0
    state.second[1][-1][-1] = -0.0
    flat = [[page for of_one in moments for page in of_one] for moments in (state.first, state.second)]
    arrays = triton_adam.Arrays(state.parameters, state.gradients, *flat, [1, 4])
    with running("triton", state, monkeypatch):
        squares, bounds = arrays.measure()
    assert squares == sum_of_squares(state.gradients)
    magnitudes = [torch.cat([x.flatten() for x in of_kind]).abs() for of_kind in (state.parameters, flat[0])]
    assert bounds[:2] == tuple(float(x.max()) for x in magnitudes)
    assert bounds.second_moment == math.inf  # a sign, so that it is looked at again


@pytest.mark.parametrize("name", FAST)
def test_threads_do_not_change_bits(name: str) -> None:
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        state = State([(70_001,), (300, 200), (5,)])
        with use(name):
            results.append((state.step(), bits(state.written())))
    torch.set_num_threads(before)
    assert results[0] == results[1]


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("value", [3.4e38, 1e-45, 1e-30])
def test_the_norm_of_extreme_gradients_neither_overflows_nor_vanishes(name: str, value: float) -> None:
    state = State([(5000,)])
    state.gradients = [torch.full((5000,), value)]
    with use(name):
        norm, clip = state.step()
    assert norm == pytest.approx(float(np.float32(value)) * math.sqrt(5000), rel=1e-12)
    assert clip == (1 / norm if norm > 1 else 1.0)
    assert all(bool(x.isfinite().all()) for x in state.written())


def spoil(array: str, index: int, value: float, at: int = -1) -> Callable[[State], None]:
    def change(state: State) -> None:
        whole_array = getattr(state, array)[index]
        whole_array.view(-1)[at] = value

    return change


SPOILED = {
    "gradient nan": (spoil("gradients", -1, math.nan), {}, "gradient norm is nan"),
    "gradient infinite": (spoil("gradients", 0, -math.inf), {}, "gradient norm is inf"),
    "parameter nan": (spoil("parameters", -1, math.nan), {}, "updated value"),
    "parameter infinite": (spoil("parameters", 0, -math.inf), {}, "updated value"),
    "first moment nan": (spoil("first", -1, math.nan), {}, "updated value"),
    "second moment infinite": (spoil("second", -1, math.inf), {}, "updated value"),
    "second moment negative": (spoil("second", -1, -1.0), {}, "updated value"),
    "gradient nan, the first": (spoil("gradients", -1, math.nan, 0), {}, "gradient norm is nan"),
    "parameter nan, the first": (spoil("parameters", -1, math.nan, 0), {}, "updated value"),
    "first moment nan, in between": (spoil("first", -1, math.nan, 5), {}, "updated value"),
    "second moment negative, in between": (spoil("second", -1, -1.0, 500), {}, "updated value"),
    "update too large": (lambda state: None, {"learning_rate": 3e38, "epsilon": 1e-30}, "updated value"),
    "square too large": (
        lambda state: spoil("gradients", -1, 1e30)(state),
        {"maximum_gradient_norm": 3e38},
        "updated value",
    ),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("case", SPOILED)
def test_a_step_that_is_not_allowed_changes_nothing(name: str, case: str, monkeypatch) -> None:
    change, rates, message = SPOILED[case]
    state = State([(3, 7), (1030,)])
    change(state)
    before = bits([*state.written(), *state.gradients])
    with running(name, state, monkeypatch), pytest.raises(ValueError, match=message):
        state.step(**rates)
    assert bits([*state.written(), *state.gradients]) == before


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("case", ["parameter nan", "first moment nan", "second moment negative"])
def test_what_is_changed_between_steps_is_looked_at_again(name: str, case: str) -> None:
    state = State([(3, 7), (1030,)])
    with use(name):
        state.step()
        state.step()
        SPOILED[case][0](state)
        before = bits(state.written())
        for _ in range(2):
            with pytest.raises(ValueError, match="updated value"):
                state.step()
    assert bits(state.written()) == before


@pytest.mark.parametrize("name", FAST)
def test_other_tensors_in_the_same_memory_are_looked_at(name: str) -> None:
    state = State([(40,)])
    with use(name):
        state.step()
        state.parameters = [torch.full((40,), torch.nan)]
        with pytest.raises(ValueError, match="updated value"):
            state.step()


@pytest.mark.parametrize("name", FAST)
def test_memory_that_a_tensor_took_over_is_looked_at(name: str) -> None:
    state = State([(40,)])
    with use(name):
        state.step()
        state.parameters[0].data = torch.full((40,), torch.nan)
        with pytest.raises(ValueError, match="updated value"):
            state.step()


@pytest.mark.parametrize("name", ALL)
def test_tensors_made_in_inference_mode_are_refused(name: str, monkeypatch) -> None:
    state = State([(40,), (3,)])
    with torch.inference_mode():
        state.second[1] = torch.ones(3)
    before = bits(state.written())
    with running(name, state, monkeypatch), pytest.raises(ValueError, match="made in inference mode"):
        state.step()
    assert bits(state.written()) == before


@pytest.mark.parametrize("name", FAST)
def test_values_that_a_step_made_large_do_not_overflow_in_the_next(name: str) -> None:
    state = State([(40,)])
    state.first, state.second = [torch.zeros(40)], [torch.zeros(40)]
    refused = False
    with use(name):
        while not refused:
            before = bits(state.written())
            try:
                state.step(learning_rate=1e38)
            except ValueError:
                refused = True
    assert state.steps > 1
    assert bits(state.written()) == before
    assert all(bool(x.isfinite().all()) for x in state.written())


@pytest.mark.parametrize("name", ALL)
def test_a_step_that_bounds_do_not_settle_is_still_done(name: str, monkeypatch) -> None:
    state = State([(3, 7), (1030,)])
    state.parameters[1][5] = 3.4028e38
    state.second[0][3] = -0.0
    _, expected = definition(state)
    with running(name, state, monkeypatch):
        state.step()
    assert bits([tensor.flatten() for tensor in state.written()]) == [x.tobytes() for x in expected]


@pytest.mark.parametrize("name", FAST)
def test_a_moments_correction_is_rounded_as_a_division_is(name: str) -> None:
    """m / (49 / 64) is exactly t, and 1 - t midway between two floats: an ulp of float64 more or less shows.

    A product with the rounded 64 / 49 is off for t above 0.7.
    """
    t = 1 - (2 * torch.arange(2**23, 2**24, 97, dtype=torch.float64) + 1) * 2**-26
    first, ones = (49 / 32 * t).float(), torch.ones(len(t))
    gradient = (49 / 32 * t - first).float()
    second, parameter = torch.full_like(ones, 0.25), ones.clone()
    rates = {"learning_rate": 1.0, "beta1": 0.5, "beta2": 1 - 2**-53, "epsilon": 0.5}
    powers = {"beta1_power": 15 / 64, "beta2_power": 0.0, "maximum_gradient_norm": 1.0}
    with use(name):  # type: ignore[arg-type]
        adam_step([parameter], [gradient], [first], [second], **rates, **powers)
    assert torch.equal(parameter, (1 - t).float())


@pytest.mark.skipif(not library(), reason="not built")
def test_what_is_known_of_the_next_step_bounds_it() -> None:
    state = State()
    for step in range(30):
        for gradient in state.gradients:
            gradient.normal_().mul_(10.0 ** (step % 5 - 2))
        state.step(maximum_gradient_norm=1e3)
        assert cpu._remembered is not None
        kinds = (state.parameters, map(whole, state.first), map(whole, state.second))
        largest = [max(float(x.abs().max()) for x in of_kind) for of_kind in kinds]
        assert all(a <= b for a, b in zip(largest, cpu._remembered.bounds, strict=True))


def test_bounds_settle_only_what_cannot_overflow() -> None:
    settings = Settings(1e-3, 0.9, 0.999, 1e-8, 1.0, 0.9, 0.999)

    def settled(gradient: float, *bounds: float) -> bool:
        return Bounds(*bounds).after(gradient, settings).finite

    assert settled(1.0, 1e30, 1e20, 1e30)
    for at in range(4):
        for wrong in (math.inf, 3.41e38):
            bounds = [1.0, 1.0, 1.0, 1.0]
            bounds[at] = wrong
            assert not settled(*bounds)
    assert not settled(2e19, 1.0, 1.0, 1.0)  # its square
    assert not settled(1.0, 1.0, 1e33, 1.0)  # divided by epsilon


@pytest.mark.parametrize("name", FAST)
def test_coordinates_without_gradient_stay_put(name: str) -> None:
    state = State([(40,)])
    state.first, state.second = [torch.zeros(40)], [torch.zeros(40)]
    state.gradients[0][::2] = 0
    before = state.parameters[0].clone()
    with use(name):
        for _ in range(500):
            state.step()
    assert torch.equal(state.parameters[0][::2], before[::2])
    assert not torch.isclose(state.parameters[0][1::2], before[1::2]).any()


@pytest.mark.parametrize("name", FAST)
def test_pages_go_on_from_a_copy_as_they_would_have(name: str) -> None:
    state, copy = State(page=1000), State(page=1000)
    with use(name):
        for _ in range(2):
            state.step()
        for one, other in zip(copy.parameters, state.parameters, strict=True):
            one.copy_(other)
        copy.first = [[page.clone() for page in of_one] for of_one in state.first]
        copy.second = [[page.clone() for page in of_one] for of_one in state.second]
        copy.steps = state.steps
        for _ in range(3):
            assert state.step() == copy.step()
    assert bits(state.written()) == bits(copy.written())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("what", ["gradients", "parameters", "first"])
def test_memory_of_any_layout_gives_the_same(name: str, what: str, monkeypatch) -> None:
    shapes = [(6, 8), (5,)]
    expected, state = State(shapes), State(shapes)
    wide = torch.full((8, 12), torch.nan)
    view = wide[:, ::2].T if what != "first" else wide.flatten()[::2]
    view.copy_(getattr(state, what)[0].view(view.shape))
    getattr(state, what)[0] = view
    with use("torch"):
        stats = expected.step()
    with running(name, state, monkeypatch):
        assert state.step() == stats
    assert bits(state.written()) == bits(expected.written())
    assert wide.isnan().sum() == 48


@pytest.mark.parametrize("name", FAST)
def test_expanded_gradients_count_every_element(name: str) -> None:
    expected, state = State([(6, 8)]), State([(6, 8)])
    state.gradients = [torch.arange(8.0).expand(6, 8)]
    expected.gradients = [state.gradients[0].clone()]
    with use(name):
        assert state.step() == expected.step()
    assert bits(state.written()) == bits(expected.written())


@pytest.mark.parametrize("name", FAST)
def test_tensors_without_elements_are_passed_over(name: str) -> None:
    expected, state = State([(5,)]), State([(5,)])
    for array in (state.parameters, state.gradients, state.first, state.second):
        array.append(torch.empty(0))
    state.parameters[1] = state.gradients[1] = torch.empty(3, 0)
    with use(name):
        assert state.step() == expected.step()
        state.first[1] = state.second[1] = []
        assert state.step() == expected.step()
    assert bits(state.parameters[:1]) == bits(expected.parameters)


def test_parameters_of_a_graph_are_updated_and_count_the_change() -> None:
    state = State([(5,)])
    parameter = state.parameters[0].requires_grad_()
    squares = parameter.square().sum()
    state.step()
    assert parameter.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@pytest.mark.parametrize("name", FAST)
def test_pages_of_one_moment_that_stand_with_another_are_refused(name: str) -> None:
    parameters, gradients = ([torch.ones(4) for _ in range(2)] for _ in range(2))
    moments = [[[torch.zeros(4), torch.zeros(4)], []] for _ in range(2)]
    with use(name), pytest.raises(ValueError, match="moments 0 have pages"):  # type: ignore[arg-type]
        adam_step(parameters, gradients, *moments, beta1_power=0.9, beta2_power=0.999)


def test_gradients_are_not_changed() -> None:
    state = State()
    before = bits(state.gradients)
    state.step()
    assert bits(state.gradients) == before


def test_the_operator_keeps_torchs_rules() -> None:
    state = State([(3, 4), (5,)], page=5)
    flat = [[page for of_one in moments for page in of_one] for moments in (state.first, state.second)]
    settings = [*RATES.values(), 0.9, 0.999]
    arguments = (state.parameters, state.gradients, *flat, [3, 1], settings)
    torch.library.opcheck(torch.ops.riftco.adam_step.default, arguments)


def test_a_compiled_function_gives_the_same() -> None:
    expected, state = State([(3, 4), (5,)]), State([(3, 4), (5,)])
    settings = [*RATES.values(), RATES["beta1"], RATES["beta2"]]

    def update(parameters, gradients, first, second):
        return torch.ops.riftco.adam_step(parameters, gradients, first, second, [1, 1], settings)

    compiled = torch.compile(update, fullgraph=True, backend="aot_eager")
    found = compiled(state.parameters, state.gradients, state.first, state.second)
    assert tuple(found.tolist()) == expected.step()
    assert bits(state.written()) == bits(expected.written())


@pytest.mark.parametrize("setting", [*RATES, "beta1_power", "beta2_power"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_settings_out_of_range_are_refused(setting: str, value: float) -> None:
    state = State([(5,)])
    arrays = (state.parameters, state.gradients, state.first, state.second)
    rates = {**RATES, "beta1_power": 0.9, "beta2_power": 0.999, setting: value}
    if setting.endswith("_power") and value == 0:  # what a product of many betas comes to
        assert adam_step(*arrays, **rates)[1] > 0
        return
    with pytest.raises(ValueError, match=f"{setting} must be"):
        adam_step(*arrays, **rates)


def test_betas_of_one_are_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        State([(5,)]).step(beta2=1.0)


def test_arrays_that_do_not_fit_are_refused() -> None:
    def broken(**changes) -> None:
        state = State([(5,), (2, 3)])
        for array, value in changes.items():
            setattr(state, array, value)
        state.step()

    five, six = torch.ones(5), torch.ones(6)
    for changes, message in [
        ({"parameters": [], "gradients": [], "first": [], "second": []}, "at least 1"),
        ({"gradients": [five]}, "equally many"),
        ({"gradients": [five, six]}, "gradient 1 is"),
        ({"first": [five, five]}, "moments 1 have pages"),
        ({"first": [[five[:2], five[2:]], six]}, "both need the same pages"),
        ({"first": [five.double(), six]}, "float64 on cpu: adam_step takes float32"),
        ({"second": [five.to("meta"), six]}, "on meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            broken(**changes)
