"""Our own products of matrices, as floats and in fixed point, with what is added in their pass."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.linear.cpu import built, product
from kernels.operands import Operands, in_bytes
from tests.kernels.cases import bits, random

pytestmark = pytest.mark.skipif(not built, reason="no native code for this machine was built")

FIXED: tuple[Operands, ...] = ("half", "int8")
RUN, RIGHT_WHOLE, LEFT_WHOLE, LEFT_TOTAL = 64, 8192, 32766, 2**31 / 8192 - 65
SIZES = [(1, 1, 1), (6, 64, 16), (7, 65, 17), (40, 63, 5), (193, 130, 97), (12, 600, 40), (33, 1025, 18)]


def units(lines: Tensor, left: bool, kind: Operands) -> Tensor:
    """What a whole number stands for, for each element of `[lines, depth]`: in a run as little as may be."""
    count, depth = lines.shape
    padded = torch.zeros(count, -(-depth // RUN) * RUN, dtype=torch.float64)
    padded[:, :depth] = lines.abs()
    runs = padded.view(count, -1, RUN)
    most, total = runs.amax(2), runs.sum(2)
    unit = torch.maximum(most / LEFT_WHOLE, total / LEFT_TOTAL) if left else most / RIGHT_WHOLE
    if kind == "int8":
        unit = most / 127
    return unit.repeat_interleave(RUN, 1)[:, :depth]


def bound(a: Tensor, b: Tensor, kind: Operands) -> Tensor:
    """How far a product in fixed point may be from float64's: half a unit for each factor, and float sums."""
    a, b = a.double(), b.double()
    for_a, for_b = 0.505 * units(a, True, kind), 0.505 * units(b.t(), False, kind).t()
    rounding = for_a @ b.abs() + a.abs() @ for_b + for_a @ for_b
    return rounding + 2e-6 * (a.abs() @ b.abs())


def factors(rows: int, depth: int, columns: int, kind: str) -> tuple[Tensor, Tensor]:
    a, b = random(rows, depth), random(depth, columns, seed=1)
    if kind == "equal":  # sums as large as they can be
        return torch.ones(rows, depth), torch.full((depth, columns), -3.0)
    if kind == "peaks":
        a[:, ::97] *= 1e4
        b[::97] *= 1e4
    if kind == "scales":
        a *= torch.logspace(-18, 15, rows)[:, None]
        b *= torch.logspace(-12, 12, columns)
    if kind == "sparse":
        a[a.abs() < 1.5] = 0
        b[:, columns // 2 :] = 0
    return a, b


def laid(x: Tensor, layout: str) -> Tensor:
    """The same matrix with its rows contiguous, its columns, or neither."""
    if layout == "columns":
        return x.t().contiguous().t()
    if layout == "neither":
        return torch.stack([x, torch.full_like(x, torch.nan)], 2)[:, :, 0]
    return x


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["normal", "equal", "peaks", "scales", "sparse"])
@pytest.mark.parametrize("operands", FIXED)
def test_fixed_point_is_within_half_a_unit_of_each_factor(size, kind, operands) -> None:
    a, b = factors(*size, kind)
    exact, most = a.double() @ b.double(), bound(a, b, operands)
    for left in ("rows", "columns", "neither"):
        for right in ("rows", "columns", "neither"):
            found = product(laid(a, left), laid(b, right), operands=operands)
            assert bool(((found.double() - exact).abs() <= most).all()), (left, right)


@pytest.mark.parametrize("seed", range(60))
def test_any_numbers_are_within_half_a_unit(seed) -> None:
    generator = np.random.default_rng(seed)
    rows, depth, columns = generator.integers(1, (60, 300, 60))
    spread = generator.uniform(0, 30)

    def matrix(*shape: int) -> Tensor:
        size = np.exp(generator.uniform(-spread, spread, shape))
        return torch.from_numpy((generator.standard_normal(shape) * size).astype(np.float32))

    a, b = matrix(rows, depth), matrix(depth, columns)
    for operands in FIXED:
        error = (product(a, b, operands=operands).double() - a.double() @ b.double()).abs()
        assert bool((error <= bound(a, b, operands)).all())


@pytest.mark.parametrize("operands", ["full", *FIXED])
@pytest.mark.parametrize("size", SIZES)
def test_the_layout_of_a_matrix_does_not_change_a_bit(size, operands) -> None:
    a, b = factors(*size, "normal")
    expected = product(a, b, operands=operands)
    for left in ("rows", "columns", "neither"):
        for right in ("rows", "columns", "neither"):
            assert torch.equal(product(laid(a, left), laid(b, right), operands=operands), expected), (
                left,
                right,
            )


def test_16_bits_are_closer_than_bfloat16() -> None:
    softmax = torch.softmax(3 * random(100, 500), 1) - torch.eye(100, 500)
    for a, b in ((random(100, 500), random(500, 70, seed=1)), (softmax, random(500, 70, seed=1))):
        exact = a.double() @ b.double()
        ours = (product(a, b, operands="half").double() - exact).norm()
        theirs = (a.bfloat16().double() @ b.bfloat16().double() - exact).norm()
        assert ours <= theirs / 8


@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_what_the_definition_says(size) -> None:
    """To the bit, where no number lies between two bytes."""
    a, b = (torch.randint(-127, 128, shape) / 8.0 for shape in (size[:2], size[1:]))
    a[:, ::RUN], b[::RUN] = 127 / 8, -127 / 8  # the scale of each run is 1 / 8
    for left, right in (
        (a, b),
        (in_bytes(random(*size[:2]), 1), b),
        (a, in_bytes(random(*size[1:], seed=1), 0)),
    ):
        exact = in_bytes(left, 1).double() @ in_bytes(right, 0).double()
        found = product(left, right, operands="int8").double()
        assert bool(((found - exact).abs() <= 1e-6 * (left.double().abs() @ right.double().abs())).all())


@pytest.mark.parametrize("operands", ["full", *FIXED])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_in_its_row_and_column_alone(operands, value) -> None:
    a, b = random(40, 100), random(100, 30, seed=1)
    a[7, 70], b[3, 5] = value, value
    broken = torch.zeros(40, 30, dtype=torch.bool)
    broken[7], broken[:, 5] = True, True
    for left in ("rows", "columns"):
        for right in ("rows", "columns"):
            found = product(laid(a, left), laid(b, right), operands=operands)
            assert torch.equal(~found.isfinite(), broken)


@pytest.mark.parametrize("operands", ["full", *FIXED])
def test_the_bits_do_not_depend_on_company_or_threads(operands) -> None:
    a, b = random(400, 700), random(700, 300, seed=1)
    whole = product(a, b, operands=operands)
    assert torch.equal(bits(whole[:205]), bits(product(a[:205], b, operands=operands)))
    assert torch.equal(bits(whole[:, 7:]), bits(product(a, b[:, 7:].contiguous(), operands=operands)))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(bits(whole), bits(product(a, b, operands=operands)))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("operands", ["full", *FIXED])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_added_is_added_once_and_not_rounded(operands, size) -> None:
    rows, depth, columns = size
    a, b = random(rows, depth), random(depth, columns, seed=1)
    bias, start = random(columns, seed=2), random(rows, columns, seed=3)
    left, right = random(rows, 9, seed=4)[:, 1:6], random(5, columns + 3, seed=5)[:, 3:]
    wanted = bias.double() + start.double() + left.double() @ right.double()
    found = product(torch.zeros_like(a), b, bias, start=start, low=(left, right), operands=operands)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=3e-6)
    found = product(a, b, bias, start=start, low=(left, right), operands=operands)
    torch.testing.assert_close(found, product(a, b, operands=operands) + wanted.float(), rtol=1e-5, atol=2e-5)
    into = start.clone()
    assert product(a, b, bias, start=into, out=into, low=(left, right), operands=operands) is into
    assert torch.equal(bits(into), bits(found))
    sums = torch.empty(rows)
    product(a, b, sums=sums, operands=operands)
    torch.testing.assert_close(sums, a.sum(1), rtol=1e-5, atol=2e-5)
