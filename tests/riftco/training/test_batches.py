"""What a batch must be, and drawing batches once."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from riftco.training import RandomWindowBatchSource, TrainingBatch, fixed_batches

IDS = torch.tensor([[1, 2], [3, 4]])


def test_targets_are_the_next_tokens() -> None:
    batch = TrainingBatch.shifted(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert batch.inputs.tolist() == [[1, 2], [4, 5]]
    assert batch.targets.tolist() == [[2, 3], [5, 6]]
    assert batch.mask is None


@pytest.mark.parametrize(
    ("inputs", "targets", "problem"),
    [
        (IDS[0], IDS[0], "rectangles"),
        (IDS[:0], IDS[:0], "rectangles"),
        (IDS, IDS[:, :1], "rectangles"),
        (IDS.int(), IDS, "inputs must be int64"),
        (IDS, IDS.float(), "targets must be int64"),
        (IDS - 2, IDS, r"inputs must be ids .* got -1\.\.2"),
        (IDS, IDS + 2**32, "targets must be ids"),
    ],
)
def test_a_batch_that_is_no_rectangle_of_ids_is_refused(
    inputs: Tensor, targets: Tensor, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        TrainingBatch(inputs, targets)


def test_the_largest_id_is_accepted() -> None:
    largest = torch.full((1, 1), 2**32 - 1)
    assert TrainingBatch(largest, largest).inputs.item() == 2**32 - 1


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        (torch.ones(2, 2), "mask must be bool"),
        (torch.ones(2, 1, dtype=torch.bool), "mask must be bool"),
        (torch.zeros(2, 2, dtype=torch.bool), "selects no target"),
    ],
)
def test_a_mask_must_fit_and_select_something(mask: Tensor, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TrainingBatch(IDS, IDS, mask)


STARTS = torch.tensor([[0, 0, 2, 2], [0, 1, 2, 2]])


@pytest.mark.parametrize(
    ("starts", "problem"),
    [
        (STARTS.int(), "document_starts must be int64"),
        (STARTS[:, :3], "document_starts must be int64"),
        (torch.tensor([[1, 1, 2, 2], [0, 0, 0, 0]]), "where its document begins"),  # the first place has none
        (STARTS.flip(0) - torch.tensor([0, 1, 0, 0]), "where its document begins"),
        (torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]), "where its document begins"),  # 1 is no beginning
        (torch.tensor([[0, 0, 2, 0], [0, 0, 0, 0]]), "where its document begins"),  # back to an earlier one
    ],
)
def test_document_starts_must_name_beginnings(starts: Tensor, problem: str) -> None:
    ids = torch.ones(2, 4, dtype=torch.int64)
    assert TrainingBatch(ids, ids, None, STARTS).document_starts is STARTS
    with pytest.raises(ValueError, match=problem):
        TrainingBatch(ids, ids, None, starts)


def test_rows_packed_full_stay_together() -> None:
    ids, starts = torch.ones(40, 4, dtype=torch.int64), STARTS[:1].expand(40, 4)
    batch = TrainingBatch(ids, ids, ids > 0, starts)
    assert [part is batch for part in batch.parts()] == [True]


def test_fixed_batches_are_the_next_ones_of_the_source() -> None:
    sources = [
        RandomWindowBatchSource(list(range(50)), batch_size=2, context_size=4, random_seed=3)
        for _ in range(2)
    ]
    fixed = fixed_batches(sources[0], 3)
    for batch in fixed:
        assert batch.inputs.equal(sources[1].next_batch().inputs)
    assert len(fixed) == sources[0].batches_emitted == 3
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        fixed_batches(sources[0], 0)


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=60).filter(any),
    rng=st.randoms(),
)
def test_parts_hold_every_counted_target_once_and_little_else(lengths: list[int], rng: random.Random) -> None:
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    gaps = [[place + 1 < length and rng.random() < 0.2 for place in range(9)] for length in lengths]
    mask &= ~torch.tensor(gaps)
    targets = torch.arange(mask.numel()).view(mask.shape)
    batch = TrainingBatch(targets + 1, targets, mask)
    parts = list(batch.parts())
    counted = torch.cat([part.targets[part.mask] for part in parts])
    assert sorted(counted.tolist()) == targets[mask].tolist()
    assert sum(part.counted for part in parts) == batch.counted
    for part in parts:
        assert part.inputs.equal(part.targets + 1)
        assert bool(part.mask[:, -1].any())
    assert len(parts) <= 4
    assert all(len(part.inputs) >= 12 for part in parts[:-1])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(any))
def test_a_flat_batch_holds_each_row_as_a_document_and_no_padding(lengths: list[int]) -> None:
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    mask[:, :-1] &= ~(mask[:, 1:] & (torch.arange(8) % 3 == 0))  # some that do not count before some that do
    targets = torch.arange(mask.numel()).view(mask.shape)
    flat = TrainingBatch(targets + 1, targets, mask).flat()
    assert flat.inputs.equal(flat.targets + 1)
    documents = [
        row[: int(of_row.nonzero().max()) + 1]
        for row, of_row in zip(targets, mask, strict=True)
        if of_row.any()
    ]
    assert flat.targets[0].tolist() == torch.cat(documents).tolist()
    assert flat.mask is not None
    assert flat.targets[flat.mask].tolist() == targets[mask].tolist()
    begins = [len(torch.cat(documents[:i])) if i else 0 for i in range(len(documents))]
    expected = [begin for begin, row in zip(begins, documents, strict=True) for _ in row]
    assert flat.document_starts is not None
    assert flat.document_starts[0].tolist() == expected


def test_a_batch_without_padding_is_flat() -> None:
    ids, starts = torch.ones(40, 4, dtype=torch.int64), STARTS[:1].expand(40, 4)
    for batch in (TrainingBatch(IDS, IDS), TrainingBatch(ids, ids, ids > 0, starts)):
        assert batch.flat() is batch


def test_a_batch_without_mask_is_its_own_part() -> None:
    batch = TrainingBatch(IDS, IDS)
    assert [part is batch for part in batch.parts()] == [True]
    assert batch.counted == 4
