"""Orthogonalisation: against the iteration in float64, and what becomes of singular values."""

import math

import pytest
import torch
from torch import Tensor

from kernels import orthogonalize
from kernels.operators import flop_counter
from kernels.orthogonalize import _orthogonalize, cpu, reference
from tests.kernels.cases import LAYOUTS, bits, random, running

SIZES = [
    (1, 1),
    (1, 7),
    (7, 1),
    (6, 16),
    (13, 50),
    (48, 48),
    (50, 49),
    (97, 33),
    (129, 128),
    (70, 300),
    (300, 140),
]
TOLERANCE = 2e-5  # of the norm


@pytest.fixture(params=("torch", "native"))
def implementation(request):
    if request.param == "native" and not cpu.built:
        pytest.skip("no native code for this machine was built")
    with running(request.param):
        yield request.param


@pytest.fixture
def native():
    if not cpu.built:
        pytest.skip("no native code for this machine was built")
    with running("native"):
        yield


def errors(actual: Tensor, matrices: Tensor) -> Tensor:
    """Of each matrix, relative to the norm of the iteration in float64."""
    exact = reference.orthogonalize(matrices.double())
    return (actual.double() - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))


def uneven(count: int, rows: int, columns: int) -> Tensor:
    """Singular values over three powers of ten."""
    matrices = random(count, rows, columns)
    return matrices.mul_(torch.logspace(0, -3, columns))


@pytest.mark.parametrize("size", SIZES)
def test_results_are_those_of_the_iteration(implementation, size) -> None:
    for matrices in (random(3, *size), uneven(3, *size)):
        before = matrices.clone()
        result = orthogonalize(matrices)
        assert result.shape == matrices.shape
        assert result.is_contiguous()
        assert errors(result, matrices).max() < TOLERANCE
        assert torch.equal(matrices, before)


@pytest.mark.parametrize("size", [(128, 128), (256, 128), (100, 700)])
def test_the_compiled_code_is_as_exact_as_torchs(native, size) -> None:
    matrices = uneven(2, *size)
    ours, torchs = orthogonalize(matrices), reference.orthogonalize(matrices)
    assert errors(ours, matrices).max() <= errors(torchs, matrices).max()


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (4, 12), (1, 7), (60, 50)])
def test_singular_values_become_even_and_directions_stay(implementation, shape) -> None:
    u, _, vh = torch.linalg.svd(random(*shape, seed=1), full_matrices=False)
    matrix = u * torch.linspace(1, 0.1, min(shape)) @ vh
    result = orthogonalize(matrix)
    singular = torch.linalg.svdvals(result)
    assert bool(((singular > 0.6) & (singular < 1.3)).all())
    in_its_basis = u.mT @ result @ vh.mT
    assert torch.allclose(in_its_basis, in_its_basis.diag().diag(), atol=1e-4)
    assert torch.allclose(orthogonalize(1000 * matrix), result, atol=1e-4)


def test_the_sign_and_the_transpose_go_through(implementation) -> None:
    matrices = random(2, 40, 60)
    result = orthogonalize(matrices)
    torch.testing.assert_close(orthogonalize(-matrices), -result, rtol=0, atol=1e-5)
    torch.testing.assert_close(orthogonalize(matrices.mT), result.mT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_will_do(implementation, layout) -> None:
    matrices = LAYOUTS[layout](random(3, 20, 31))
    expected = orthogonalize(matrices.contiguous())
    torch.testing.assert_close(orthogonalize(matrices), expected, rtol=0, atol=1e-5)


def test_matrices_may_have_any_number_of_axes_before(implementation) -> None:
    matrices = random(6, 9, 20)
    expected = orthogonalize(matrices)
    torch.testing.assert_close(orthogonalize(matrices.view(2, 3, 9, 20)), expected.view(2, 3, 9, 20))
    torch.testing.assert_close(orthogonalize(matrices[4]), expected[4])


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0)])
def test_nothing_gives_nothing(implementation, shape) -> None:
    assert orthogonalize(torch.empty(shape)).shape == shape


@pytest.mark.parametrize("shape", [(5, 9), (50, 20)])
def test_zeros_stay_zeros(implementation, shape) -> None:
    matrices = torch.stack([torch.zeros(shape), random(*shape)])
    result = orthogonalize(matrices)
    assert not result[0].any()
    assert errors(result[1], matrices[1]) < TOLERANCE


@pytest.mark.parametrize("shape", [(40, 60), (60, 40)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_lost_and_stays_where_it_is(implementation, shape, value) -> None:
    matrices = random(3, *shape)
    matrices[1, 2, 3] = value
    result = orthogonalize(matrices)
    assert not result[1].isfinite().any()
    assert errors(result[::2], matrices[::2]).max() < TOLERANCE


@pytest.mark.parametrize("power", [-10, 100])
def test_the_scale_does_not_show(native, power) -> None:
    """Squares that float32 cannot hold, too."""
    matrices = random(2, 30, 20)
    torch.testing.assert_close(
        orthogonalize(matrices * 2.0**power), orthogonalize(matrices), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("size", [(2, 260, 260), (1, 300, 257), (5, 30, 50)])
def test_neither_threads_nor_neighbours_show(native, size) -> None:
    """The large ones are shared among threads where there are too few of them."""
    matrices, threads, runs = random(*size), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            runs.append(orthogonalize(matrices))
            orthogonalize(torch.full((4, 300, 200), torch.nan))  # what their memory held before shows neither
            runs += [torch.stack([orthogonalize(matrix) for matrix in matrices])]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(bits(runs[0]), bits(other)) for other in runs[1:])


def test_large_matrices_and_other_dtypes_are_torchs(implementation, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "LARGEST", 48 * 48)
    large, small = random(2, 48, 49), random(2, 48, 48)
    assert torch.equal(orthogonalize(large), reference.orthogonalize(large))
    for dtype in (torch.float64, torch.bfloat16):
        result = orthogonalize(small.to(dtype))
        assert result.dtype == dtype
        assert torch.equal(result, reference.orthogonalize(small.to(dtype)))


def test_the_result_carries_no_gradient(implementation) -> None:
    assert not orthogonalize(random(3, 4).requires_grad_()).requires_grad


@pytest.mark.parametrize("matrices", [torch.ones(3), torch.ones(2, 2, dtype=torch.int64)])
def test_what_does_not_fit_is_refused(matrices) -> None:
    with pytest.raises(
        ValueError, match=r"orthogonalize: matrices must be .*\[..., rows, columns\], got torch"
    ):
        orthogonalize(matrices)


def test_the_operator_is_sound() -> None:
    for shape in ((2, 6, 5), (2, 5, 6)):
        torch.library.opcheck(_orthogonalize, (random(*shape),))
    matrices = random(2, 6, 5)
    compiled = torch.compile(orthogonalize, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(matrices), orthogonalize(matrices))


def test_products_are_counted() -> None:
    with flop_counter(display=False) as counter:
        orthogonalize(random(3, 8, 5))
    assert counter.get_total_flops() == 3 * 5 * 2 * (2 * 5 * 5 * 8 + 5 * 5 * 5)
