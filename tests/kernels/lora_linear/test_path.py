"""The narrow products of an adapter against float64, whatever the shape, the layout and the threads."""

import pytest
import torch

from kernels.lora_linear import path
from kernels.native import library
from tests.kernels.cases import LAYOUTS, bits, random, running

SHAPES = [
    (1, 1, 1),
    (2, 16, 8),
    (3, 15, 9),
    (7, 17, 3),
    (8, 33, 8),
    (9, 100, 24),
    (65, 64, 16),
    (130, 257, 8),
]


@pytest.fixture(params=["torch", "native"])
def implementation(request):
    if request.param == "native" and library() is None:
        pytest.skip("no native code was built")
    with running(request.param):
        yield request.param


@pytest.mark.parametrize(("rows", "width", "rank"), SHAPES)
def test_products_are_those_of_float64(implementation, rows, width, rank) -> None:
    x, factors, left = random(rows, width), random(rank, width, seed=1), random(rows, rank, seed=2)
    product, gradient = path._product(x, factors, 0.75), path._gradient(left, x, -1.5)
    assert product.is_contiguous()
    torch.testing.assert_close(product.double(), 0.75 * x.double() @ factors.double().T, rtol=0, atol=1e-4)
    torch.testing.assert_close(gradient.double(), -1.5 * left.double().T @ x.double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_will_do(implementation, layout) -> None:
    lay = LAYOUTS[layout]
    x, factors, left = lay(random(19, 37)), lay(random(5, 37, seed=1)), lay(random(19, 5, seed=2))
    for actual, wanted in (
        (path._product(x, factors, 1.0), path._product(x.contiguous(), factors.contiguous(), 1.0)),
        (path._gradient(left, x, 1.0), path._gradient(left.contiguous(), x.contiguous(), 1.0)),
    ):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5)


def test_nothing_gives_nothing(implementation) -> None:
    assert path._product(torch.ones(0, 5), torch.ones(8, 5), 1.0).shape == (0, 8)
    assert bool((path._gradient(torch.ones(0, 8), torch.ones(0, 5), 1.0) == 0).all())
    assert path._product(torch.ones(3, 5), torch.ones(0, 5), 1.0).shape == (3, 0)


@pytest.mark.skipif(library() is None, reason="no native code was built")
def test_the_number_of_threads_does_not_show() -> None:
    x, factors, left = random(401, 300), random(8, 300, seed=1), random(401, 8, seed=2)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append((path._product(x, factors, 1.0), path._gradient(left, x, 1.0)))
    finally:
        torch.set_num_threads(before)
    for one, three in zip(*found, strict=True):
        assert torch.equal(bits(one), bits(three))
