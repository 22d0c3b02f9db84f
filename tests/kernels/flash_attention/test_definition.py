"""Causal attention, both kinds, against the definition in float64."""

import math

import pytest
import torch

from kernels import flash_attention, materialized_attention

KINDS = [materialized_attention, flash_attention]


def _inputs(shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def _definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(v)
    for i in range(q.shape[2]):
        scores = (q[:, :, i : i + 1] * k[:, :, : i + 1]).sum(-1) / math.sqrt(q.shape[-1])
        out[:, :, i] = (scores.softmax(-1)[..., None] * v[:, :, : i + 1]).sum(2)
    return out


@pytest.mark.parametrize("attend", KINDS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 4), (1, 2, 33, 24), (2, 1, 64, 80)])
def test_values_and_gradients_equal_the_definition(attend, shape: tuple[int, ...]) -> None:
    inputs = [x.requires_grad_() for x in _inputs(shape)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    upstream = torch.cos(torch.arange(math.prod(shape), dtype=torch.float64)).view(shape)
    actual, expected = attend(*inputs), _definition(*exact)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=0)
    actual.backward(upstream.float())
    expected.backward(upstream)
    for x, y in zip(inputs, exact, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attend", KINDS)
def test_documents_in_a_row_are_as_each_alone(attend) -> None:
    lengths, width = [[3, 1, 4], [8], [1, 7]], 8
    inputs = [x.requires_grad_() for x in _inputs((3, 2, width, 5))]
    upstream = torch.cos(torch.arange(float(inputs[0].numel()))).view(inputs[0].shape)
    begins = [[sum(row[:i]) for i in range(len(row))] for row in lengths]
    starts = torch.tensor(
        [
            [b for b, n in zip(*pair, strict=True) for _ in range(n)]
            for pair in zip(begins, lengths, strict=True)
        ]
    )
    out = attend(*inputs, document_starts=starts)
    out.backward(upstream)
    for row, (row_begins, row_lengths) in enumerate(zip(begins, lengths, strict=True)):
        for begin, length in zip(row_begins, row_lengths, strict=True):
            one = (slice(row, row + 1), slice(None), slice(begin, begin + length))
            alone = [x.detach()[one].clone().requires_grad_() for x in inputs]
            expected = attend(*alone)
            torch.testing.assert_close(out[one], expected, atol=1e-6, rtol=0)
            expected.backward(upstream[one])
            for x, y in zip(inputs, alone, strict=True):
                torch.testing.assert_close(x.grad[one], y.grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize("attend", KINDS)
def test_inputs_that_are_not_contiguous_give_the_same(attend) -> None:
    q, k, v = _inputs((2, 3, 5, 4))
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(attend(*views), attend(q, k, v), atol=1e-6, rtol=0)


@pytest.mark.parametrize("attend", KINDS)
def test_large_scores_stay_finite(attend) -> None:
    q, k, v = _inputs((1, 1, 9, 8))
    assert bool(attend(q * 1e4, k * 1e4, v).isfinite().all())
