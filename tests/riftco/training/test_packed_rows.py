"""Packed rows: every document once an epoch, in rows that fit, seen by the model as if each stood alone."""

from collections import Counter
from itertools import groupby
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import ModelConfig
from riftco.model import DecoderOnlyTransformer, LoraConfig
from riftco.training import PackedRowsBatchSource, TrainingBatch, document_batches
from riftco.training.loop import batch_loss
from riftco.training.packed_rows import pack

CONTEXT = 7
lengths_of_documents = st.lists(st.integers(2, 12), min_size=1, max_size=15)


def documents_of(lengths: list[int]) -> list[list[int]]:
    """Documents whose tokens name the document and the place in it."""
    return [[100 * index + place for place in range(length)] for index, length in enumerate(lengths)]


def source_of(
    lengths: list[int], *, batch_size: int = 3, seed: int = 1, **more: Any
) -> PackedRowsBatchSource:
    return PackedRowsBatchSource(
        documents_of(lengths), batch_size=batch_size, context_size=CONTEXT, random_seed=seed, **more
    )


def documents_in(batch: TrainingBatch) -> list[list[list[int]]]:
    """The documents of each row: its first input and all its targets, put together from `document_starts`."""
    assert batch.mask is not None
    assert batch.document_starts is not None
    rows = []
    for ids, targets, chosen, starts in zip(
        batch.inputs.tolist(),
        batch.targets.tolist(),
        batch.mask.tolist(),
        batch.document_starts.tolist(),
        strict=True,
    ):
        runs = [list(run) for _, run in groupby(range(len(ids)), key=starts.__getitem__)]
        rows.append([[ids[run[0]], *(targets[p] for p in run)] for run in runs if chosen[run[0]]])
    return rows


@given(lengths=lengths_of_documents, batch_size=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_document_comes_up_once_in_each_epoch(lengths: list[int], batch_size: int, seed: int) -> None:
    source = source_of(lengths, batch_size=batch_size, seed=seed)
    epochs, per_epoch = 2, source.rows_per_epoch
    batches = [source.next_batch() for _ in range(-(-per_epoch * epochs // batch_size))]
    rows = [row for batch in batches for row in documents_in(batch)]
    for epoch in range(epochs):
        of_epoch = rows[epoch * per_epoch : (epoch + 1) * per_epoch]
        seen = [document[0] // 100 for row in of_epoch for document in row]
        assert sorted(seen) == list(range(len(lengths)))


@given(lengths=lengths_of_documents, seed=st.integers(0, 99))
def test_rows_hold_whole_documents_or_windows_of_long_ones(lengths: list[int], seed: int) -> None:
    batch = source_of(lengths, seed=seed).next_batch()
    assert batch.inputs.shape == (3, CONTEXT)
    for row in documents_in(batch):
        assert sum(len(document) - 1 for document in row) <= CONTEXT
        for document in row:
            index, place = divmod(document[0], 100)
            assert len(document) == min(lengths[index], CONTEXT + 1)
            assert document == list(range(document[0], document[0] + len(document)))
            assert place + len(document) <= lengths[index]
            assert place == 0 or lengths[index] > CONTEXT + 1


@given(lengths=lengths_of_documents, seed=st.integers(0, 99))
def test_no_target_crosses_a_document_and_padding_counts_for_nothing(lengths: list[int], seed: int) -> None:
    batch = source_of(lengths, seed=seed).next_batch()
    assert batch.mask is not None
    counted = batch.targets[batch.mask] - batch.inputs[batch.mask]
    assert counted.eq(1).all()  # the next token of the same document
    rows = documents_in(batch)
    assert batch.counted == sum(len(document) - 1 for row in rows for document in row)
    used = torch.tensor([sum(len(document) - 1 for document in row) for row in rows])
    assert batch.mask.equal(torch.arange(CONTEXT) < used[:, None])


@settings(max_examples=40)
@given(lengths=lengths_of_documents, batch=st.integers(0, 9), batch_size=st.integers(1, 5))
def test_a_source_restarted_at_any_batch_goes_on_with_the_same(
    lengths: list[int], batch: int, batch_size: int
) -> None:
    source = source_of(lengths, batch_size=batch_size)
    for _ in range(batch):
        source.next_batch()
    restarted = source_of(lengths, batch_size=batch_size)
    restarted.restore_checkpoint_state(source.checkpoint_state())
    for _ in range(2):
        assert_same(source.next_batch(), restarted.next_batch())


def assert_same(left: TrainingBatch, right: TrainingBatch) -> None:
    for name in ("inputs", "targets", "mask", "document_starts"):
        assert getattr(left, name).equal(getattr(right, name)), name


def test_the_order_is_a_function_of_the_seed() -> None:
    # Pinned: an order that changes between versions would make a resumed run another run.
    source = source_of([2, 9, 4, 3, 5, 2], batch_size=2, seed=7)
    first = [[document[0] for document in row] for row in documents_in(source.next_batch())]
    assert first == [[400, 200], [101]]
    order = [d for _ in range(9) for row in documents_in(source.next_batch()) for d in row]
    other = source_of([2, 9, 4, 3, 5, 2], batch_size=2, seed=8)
    other.next_batch()
    assert order != [d for _ in range(9) for row in documents_in(other.next_batch()) for d in row]


def test_windows_of_a_long_document_reach_every_place() -> None:
    source = source_of([11], batch_size=100)
    starts = Counter(row[0][0] for row in documents_in(source.next_batch()))
    assert set(starts) == {0, 1, 2, 3}


@given(lengths=lengths_of_documents, data=st.data())
def test_context_tokens_are_never_targets_and_every_document_has_one(
    lengths: list[int], data: st.DataObject
) -> None:
    contexts = [data.draw(st.integers(1, length - 1)) for length in lengths]
    source = source_of(lengths, batch_size=source_of(lengths).rows_per_epoch, contexts=contexts)
    batch = source.next_batch()
    assert batch.mask is not None
    is_token = batch.targets == batch.inputs + 1  # else it is padding
    context = torch.tensor(contexts)[batch.targets // 100]
    assert batch.mask.equal(is_token & (batch.targets % 100 >= context))
    assert set((batch.targets[batch.mask] // 100).tolist()) == set(range(len(lengths)))


def test_a_window_of_a_long_document_always_holds_a_target() -> None:
    for context in (1, 3, 8, 10, 11):
        source = source_of([12], batch_size=60, contexts=[context])
        batch = source.next_batch()
        assert batch.mask is not None
        assert bool(batch.mask.any(1).all())
        assert set((batch.targets[batch.mask]).tolist()) == set(range(max(1, context), 12))


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 30))
def test_rows_of_sizes_fit_and_lose_nothing(sizes: list[int], capacity: int) -> None:
    rows = pack(sizes, capacity)
    assert sorted(size for row in rows for size in row) == sorted(sizes)
    assert all(0 < sum(row) <= capacity for row in rows)
    for index, row in enumerate(rows):
        # What opened a later row fitted into none of the earlier ones.
        assert all(capacity - sum(row) < later[0] for later in rows[index + 1 :])


def test_best_fit_takes_the_tightest_row() -> None:
    assert pack([6, 5, 4, 3, 2], 10) == [[6, 4], [5, 3, 2]]
    assert pack([7, 6, 3, 4], 10) == [[7, 3], [6, 4]]
    assert pack([10, 1, 10], 10) == [[10], [10], [1]]


def test_hardly_a_place_is_padding() -> None:
    lengths = [2 + (i * i * 7919) % 90 for i in range(2000)]
    source = PackedRowsBatchSource(documents_of(lengths), batch_size=8, context_size=128, random_seed=0)
    assert source.useful_share > 0.98
    assert source.useful_share == pytest.approx(
        sum(length - 1 for length in lengths) / (source.rows_per_epoch * 128)
    )


def test_masks_and_kind_are_part_of_the_fingerprint() -> None:
    plain, masked = source_of([4, 5]), source_of([4, 5], contexts=[2, 1])
    assert plain.fingerprint == source_of([4, 5], contexts=[1, 1], seed=9).fingerprint
    assert plain.fingerprint != masked.fingerprint
    assert masked.fingerprint != source_of([4, 5], contexts=[1, 2]).fingerprint


@pytest.mark.parametrize("contexts", [[4, 1], [1, 9]])
def test_documents_with_nothing_to_predict_are_refused_with_a_count(contexts: list[int]) -> None:
    with pytest.raises(ValueError, match="1 documents have nothing to predict"):
        source_of([4, 5], contexts=contexts)


# What the model makes of packed rows.

ROWS = [[(3 * i + place * place) % 29 for place in range(n)] for i, n in enumerate([5, 3, 8, 2, 6, 4, 13, 7])]
POLICIES = [
    ("flash", "disabled"),
    ("materialized", "disabled"),
    ("flash", "block"),
    ("materialized", "block"),
]


def model_of(attention: str, checkpointing: str) -> DecoderOnlyTransformer:
    model = DecoderOnlyTransformer(ModelConfig(30, 12, 8, 2, 2, 12, random_seed=3))
    model.attention = attention  # type: ignore[assignment]
    model.activation_checkpointing = checkpointing  # type: ignore[assignment]
    return model


def one_packed_epoch() -> TrainingBatch:
    source = PackedRowsBatchSource(ROWS, batch_size=4, context_size=12, random_seed=0)
    assert source.rows_per_epoch == 4
    return source.next_batch()


def gradients(model: DecoderOnlyTransformer, batch: TrainingBatch) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = batch_loss(model, batch)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize("attention", ["flash", "materialized"])
def test_packed_logits_are_those_of_each_document_alone(attention: str) -> None:
    model, batch = model_of(attention, "disabled"), one_packed_epoch()
    assert batch.document_starts is not None
    with torch.no_grad():
        packed = model(batch.inputs, document_starts=batch.document_starts)
        for row, starts in enumerate(batch.document_starts.tolist()):
            for begin in sorted(set(starts)):
                end = begin + starts.count(begin)
                alone = model(batch.inputs[row, begin:end])[0]
                torch.testing.assert_close(packed[row, begin:end], alone, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("attention", "checkpointing"), POLICIES)
@pytest.mark.parametrize("lora", [False, True])
def test_packed_gradients_are_those_of_padded_rows(attention: str, checkpointing: str, lora: bool) -> None:
    model = model_of(attention, checkpointing)
    if lora:
        model.attach_lora(
            LoraConfig(targets=("attention.query", "feed_forward.expand", "language_model_head"))
        )
        for name, parameter in model.adapter_parameters().items():
            if ".lora_b" in name:
                torch.nn.init.constant_(parameter, 0.01)
    packed = gradients(model, one_packed_epoch())
    source = [row if len(row) <= 13 else row[:13] for row in ROWS]
    (padded,) = document_batches(source, batch_size=8, context_size=12)
    expected = gradients(model, padded)
    assert packed.keys() == expected.keys()
    assert len(packed) > 5
    for name, value in expected.items():
        torch.testing.assert_close(packed[name], value, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("attention", ["flash", "materialized"])
def test_disturbing_one_document_leaves_the_bits_of_the_others(attention: str) -> None:
    model, batch = model_of(attention, "disabled"), one_packed_epoch()
    assert batch.document_starts is not None
    with torch.no_grad():
        calm = model(batch.inputs, document_starts=batch.document_starts)
        for row, starts in enumerate(batch.document_starts.tolist()):
            for begin in sorted(set(starts)):
                end = begin + starts.count(begin)
                disturbed = batch.inputs.clone()
                disturbed[row, begin:end] = (disturbed[row, begin:end] + 11) % 30
                now = model(disturbed, document_starts=batch.document_starts)
                others = torch.ones(now.shape[:2], dtype=torch.bool)
                others[row, begin:end] = False
                assert now[others].equal(calm[others])
                assert not now[row, begin].equal(calm[row, begin])


def test_what_stands_in_the_padding_changes_no_bit_of_loss_or_gradient() -> None:
    model, batch = model_of("flash", "disabled"), one_packed_epoch()
    mask = batch.mask
    assert mask is not None
    assert not mask.all()
    expected = gradients(model, batch)
    poisoned = TrainingBatch(
        batch.inputs.masked_fill(~mask, 29), batch.targets.masked_fill(~mask, 7), mask, batch.document_starts
    )
    for name, value in gradients(model, poisoned).items():
        assert value.equal(expected[name]), name


def test_starts_that_do_not_fit_the_ids_are_refused_by_the_model() -> None:
    model, ids = model_of("materialized", "disabled"), torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"document_starts must be \[2, 4\]"):
        model(ids, document_starts=torch.zeros(1, 4, dtype=torch.int64))
