"""The narrow products of an adapter against float64, whatever the shape, the layout and the threads."""

import pytest
import torch

from kernels.lora_linear import cpu, path
from kernels.native import library
from tests.kernels.cases import LAYOUTS, assert_as_exact_as, bits, random, running

SHAPES = [(1, 1, 8), (2, 16, 16), (3, 15, 8), (9, 100, 16), (65, 64, 8), (300, 257, 8)]


@pytest.fixture
def compiled(monkeypatch) -> None:
    """The compiled code also where it is not the faster one."""
    if library() is None:
        pytest.skip("no native code was built")
    monkeypatch.setattr(cpu, "_fast", True)
    monkeypatch.setattr(cpu, "_FEWEST_ROWS", 1)


@pytest.fixture(params=["torch", "native"])
def implementation(request):
    if request.param == "native":
        request.getfixturevalue("compiled")
    with running(request.param):
        yield request.param


def check(x: torch.Tensor, factors: torch.Tensor, left: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both products, held against torch's and float64."""
    product, gradient = path._narrow_product(x, factors, 0.75), path._narrow_gradient(left, x, -1.5)
    assert product.is_contiguous()
    assert_as_exact_as(product, 0.75 * (x @ factors.T), 0.75 * x.double() @ factors.double().T, 3, "product")
    exact = -1.5 * left.double().T @ x.double()
    assert_as_exact_as(gradient, -1.5 * left.T @ x, exact, 3, "gradient")
    return product, gradient


@pytest.mark.parametrize(("rows", "width", "rank"), [*SHAPES, (7, 17, 3), (12, 33, 40)])
def test_products_are_as_exact_as_torchs(implementation, rows, width, rank) -> None:
    check(random(rows, width), random(rank, width, seed=1), random(rows, rank, seed=2))


def test_sums_of_many_rows_are_as_exact_as_torchs(implementation) -> None:
    check(random(8192, 40), random(8, 40, seed=1), random(8192, 8, seed=2))
    check(torch.full((8192, 40), 0.1), random(8, 40, seed=1), torch.full((8192, 8), 0.3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_will_do(implementation, layout) -> None:
    lay = LAYOUTS[layout]
    check(lay(random(19, 37)), lay(random(8, 37, seed=1)), lay(random(19, 8, seed=2)))


def test_rows_may_lie_apart(implementation) -> None:
    x = random(40, 37)
    check(x[::2], random(8, 37, seed=1), random(20, 8, seed=2))


def test_nothing_gives_nothing(implementation) -> None:
    assert path._narrow_product(torch.ones(0, 5), torch.ones(8, 5), 1.0).shape == (0, 8)
    assert bool((path._narrow_gradient(torch.ones(0, 8), torch.ones(0, 5), 1.0) == 0).all())
    assert path._narrow_product(torch.ones(3, 0), torch.ones(8, 0), 1.0).equal(torch.zeros(3, 8))
    assert path._narrow_product(torch.ones(3, 5), torch.ones(0, 5), 1.0).shape == (3, 0)


@pytest.mark.parametrize(("rows", "width", "rank"), SHAPES)
def test_the_number_of_threads_does_not_show_in_compiled_code(compiled, rows, width, rank) -> None:
    x, factors, left = random(rows, width), random(rank, width, seed=1), random(rows, rank, seed=2)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append((path._narrow_product(x, factors, 1.0), path._narrow_gradient(left, x, 1.0)))
    finally:
        torch.set_num_threads(before)
    for one, three in zip(*found, strict=True):
        assert torch.equal(bits(one), bits(three))
