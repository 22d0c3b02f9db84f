"""Paged attention against contiguous attention, with poison wherever nothing was written."""

import math

import pytest
import torch

from kernels import paged_attention

HEADS, WIDTH, PAGE = 2, 6, 16


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("count", [1, 4, 15])
def test_it_equals_contiguous_attention_and_never_reads_beyond_the_length(length: int, count: int) -> None:
    count = min(count, length)
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, generator=generator) for _ in range(3))
    table = torch.tensor([5, 0, 3])[: math.ceil(length / PAGE)]
    key_pages, value_pages = _paged(k, table), _paged(v, table)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (q @ k.mT / math.sqrt(WIDTH)).masked_fill(hidden, -math.inf)
    expected = (scores.softmax(-1) @ v)[:, :, -count:]
    actual = paged_attention(q[:, :, -count:], key_pages, value_pages, table, length)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


def _paged(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    pages = torch.full((7, HEADS, PAGE, WIDTH), math.nan)
    for logical, page in enumerate(x.split(PAGE, 2)):
        pages[table[logical], :, : page.shape[2]] = page[0]
    return pages


def test_a_page_may_be_shared() -> None:
    pages = torch.randn(2, HEADS, PAGE, WIDTH)
    q = torch.randn(1, HEADS, 1, WIDTH)
    twice = paged_attention(q, pages, pages, torch.tensor([1, 1]), 32)
    once = paged_attention(q, pages, pages, torch.tensor([1]), 16)
    torch.testing.assert_close(twice, once, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("table", "length", "message"),
    [
        ([0], 17, "need 2 pages"),
        ([0, 1], 16, "need 1 pages"),
        ([2], 4, "page"),
        ([-1], 4, "page"),
        ([], 0, "1 queries"),
    ],
)
def test_tables_that_do_not_fit_are_refused(table: list[int], length: int, message: str) -> None:
    pages = torch.zeros(2, HEADS, PAGE, WIDTH)
    with pytest.raises(ValueError, match=message):
        paged_attention(
            torch.zeros(1, HEADS, 1, WIDTH), pages, pages, torch.tensor(table, dtype=torch.int64), length
        )
