"""One document per row: framing, epochs without replacement, windows of long ones, padding without effect."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifacts import ModelConfig
from riftco.config import AttentionKind
from riftco.model import DecoderOnlyTransformer, next_token_loss
from riftco.tokenizer import Tokenizer
from riftco.training import DocumentRowsBatchSource, TrainingBatch, document_batches, frame_documents
from riftco.training.loop import batch_loss

lengths_of_documents = st.lists(st.integers(2, 12), min_size=1, max_size=9)


def source_of(
    lengths: list[int], *, batch_size: int = 3, context_size: int = 5, seed: int = 1
) -> DocumentRowsBatchSource:
    """Documents whose tokens name the document and the place in it."""
    documents = [[100 * index + place for place in range(length)] for index, length in enumerate(lengths)]
    return DocumentRowsBatchSource(
        documents, batch_size=batch_size, context_size=context_size, random_seed=seed
    )


def rows_of(batch: TrainingBatch) -> list[list[int]]:
    """The unpadded rows of a batch: the first input and every target that counts."""
    assert batch.mask is not None
    return [
        [int(first[0]), *targets[chosen].tolist()]
        for first, targets, chosen in zip(batch.inputs, batch.targets, batch.mask, strict=True)
    ]


def test_a_document_stands_between_newlines_of_its_own() -> None:
    tokenizer = Tokenizer("\na\na\na\nb\nb\nb" * 9, method="bpe", vocabulary_size=262)
    assert tokenizer.encode("\n") == [10]
    assert len(tokenizer.encode("\na\n")) < 3  # the text as one piece would merge its newlines away
    assert frame_documents(tokenizer, ["a", "b\nb"]) == [[10, 97, 10], [10, *tokenizer.encode("b\nb"), 10]]


def test_an_end_of_text_token_ends_a_document_in_place_of_the_newline() -> None:
    tokenizer = Tokenizer("\na\nb" * 9, method="bpe", vocabulary_size=260, end_of_text=True)
    end = tokenizer.end_of_text_id
    assert frame_documents(tokenizer, ["a", "b\nb"]) == [[10, 97, end], [10, *tokenizer.encode("b\nb"), end]]
    rows = frame_documents(tokenizer, ["a", "b\nb", "ab ba"])
    batch = DocumentRowsBatchSource(rows, batch_size=3, context_size=20, random_seed=0).next_batch()
    assert batch.mask is not None
    assert ((batch.targets == end) & batch.mask).sum(1).tolist() == [1, 1, 1]
    assert all(row[-1] == end for row in rows_of(batch))


@given(lengths=lengths_of_documents, batch_size=st.integers(1, 7), seed=st.integers(0, 99))
def test_every_document_comes_up_once_in_each_epoch(lengths: list[int], batch_size: int, seed: int) -> None:
    source = source_of(lengths, batch_size=batch_size, seed=seed)
    epochs = 3
    batches = [source.next_batch() for _ in range(-(-len(lengths) * epochs // batch_size))]
    seen = [row[0] // 100 for batch in batches for row in rows_of(batch)][: len(lengths) * epochs]
    for epoch in range(epochs):
        assert sorted(seen[epoch * len(lengths) : (epoch + 1) * len(lengths)]) == list(range(len(lengths)))


@given(lengths=lengths_of_documents, seed=st.integers(0, 99))
def test_rows_are_whole_documents_or_windows_of_long_ones(lengths: list[int], seed: int) -> None:
    source = source_of(lengths, seed=seed)
    for row in rows_of(source.next_batch()):
        length = lengths[row[0] // 100]
        assert row == list(range(row[0], row[0] + min(length, 6)))
        assert row[-1] % 100 < length


def test_windows_of_a_long_document_reach_every_place() -> None:
    source = source_of([9], batch_size=100)
    starts = Counter(row[0] for row in rows_of(source.next_batch()))
    assert set(starts) == {0, 1, 2, 3}


def test_epochs_differ_and_seeds_differ() -> None:
    def order(seed: int) -> list[int]:
        source = source_of([2] * 20, batch_size=40, seed=seed)
        return [row[0] // 100 for row in rows_of(source.next_batch())]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[:20] != order(1)[20:]


def test_the_order_is_a_function_of_seed_and_batch_number_alone() -> None:
    # Pinned: an order that changes between versions would make a resumed run another run.
    source = source_of([2, 9, 4, 3], batch_size=5, seed=7)
    source.next_batch()
    second = source.next_batch()
    jumped = source_of([2, 9, 4, 3], batch_size=5, seed=7)
    jumped.batches_emitted = 1
    assert rows_of(jumped.next_batch()) == rows_of(second)
    assert [row[0] for row in rows_of(second)] == [300, 200, 101, 300, 101]


def test_rows_are_as_wide_as_the_longest_of_their_batch() -> None:
    batch = source_of([2, 4, 3], batch_size=3).next_batch()
    assert batch.inputs.shape == batch.targets.shape == (3, 3)
    assert batch.mask is not None
    assert sorted(batch.mask.sum(1).tolist()) == [1, 2, 3]


def test_document_batches_keep_the_order_cut_long_ones_and_keep_the_rest() -> None:
    documents = [[10 * index + place for place in range(length)] for index, length in enumerate([3, 8, 2])]
    batches = document_batches(documents, batch_size=2, context_size=4)
    assert [rows_of(batch) for batch in batches] == [[[0, 1, 2], [10, 11, 12, 13, 14]], [[20, 21]]]


def test_context_tokens_are_seen_but_never_targets() -> None:
    documents, contexts = [[0, 1, 2, 3], [10, 11], [20, 21, 22, 23, 24, 25, 26, 27, 28]], [3, 1, 8]
    source = DocumentRowsBatchSource(
        documents, batch_size=3, context_size=5, random_seed=0, contexts=contexts
    )
    for _ in range(9):
        batch = source.next_batch()
        assert batch.mask is not None
        learned = batch.targets[batch.mask].tolist()
        assert sorted(learned) == [3, 11, 28]  # a window of the long one reaches its only target
        row = int((batch.targets == 3).any(1).nonzero())
        assert batch.inputs[row, :3].tolist() == [0, 1, 2]


def test_documents_with_nothing_to_predict_are_refused_with_a_count() -> None:
    with pytest.raises(ValueError, match="2 documents have nothing to predict"):
        source_of([1, 4, 1])
    with pytest.raises(ValueError, match="no documents"):
        source_of([])


def gradients(model: DecoderOnlyTransformer, batch: TrainingBatch) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = batch_loss(model, batch)
    loss.backward()
    return {
        "loss": loss.detach(),
        **{name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize("attention", ["materialized", "flash"])
def test_what_stands_in_the_padding_changes_no_bit_of_loss_or_gradient(attention: str) -> None:
    model = DecoderOnlyTransformer(ModelConfig(17, 6, 8, 2, 2, 12, random_seed=3))
    model.attention = attention  # type: ignore[assignment]
    source = DocumentRowsBatchSource(
        [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10, 11]], batch_size=3, context_size=6, random_seed=0
    )
    batch = source.next_batch()
    mask = batch.mask
    assert mask is not None
    expected = gradients(model, batch)
    for poison in (0, 5, 16):
        # An input is padding where its own target does not count.
        poisoned = TrainingBatch(
            batch.inputs.masked_fill(~mask, poison), batch.targets.masked_fill(~mask, poison), mask
        )
        actual = gradients(model, poisoned)
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert actual[name].equal(value), name


@pytest.mark.parametrize("attention", ["materialized", "flash"])
def test_a_ragged_batch_in_parts_or_flat_has_the_gradients_of_the_whole(attention: AttentionKind) -> None:
    model = DecoderOnlyTransformer(ModelConfig(30, 12, 8, 2, 2, 12, random_seed=3))
    model.attention = attention
    rows = [[(place * place) % 29 for place in range(length)] for length in (2, 13, 5, 9, 7, 3, 11) * 6]
    (batch,) = document_batches(rows, batch_size=len(rows), context_size=12)
    assert len(list(batch.parts())) > 2
    assert batch.flat().inputs.numel() > 10 * model.config.maximum_context
    in_parts = gradients(model, batch)
    model.zero_grad(set_to_none=True)
    whole = next_token_loss(model, batch.inputs, batch.targets, batch.mask)
    whole.backward()
    assert in_parts["loss"].item() == pytest.approx(whole.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(in_parts[name], parameter.grad, rtol=1e-4, atol=1e-7), name


def test_the_loss_is_the_mean_over_counted_targets_not_over_rows() -> None:
    model = DecoderOnlyTransformer(ModelConfig(17, 6, 8, 2, 1, 12, random_seed=3))
    rows = [[1, 2], [3, 4, 5, 6, 7]]
    (batch,) = document_batches(rows, batch_size=2, context_size=6)
    alone = [batch_loss(model, one).item() for one in document_batches(rows, batch_size=1, context_size=6)]
    assert batch_loss(model, batch).item() == pytest.approx((alone[0] * 1 + alone[1] * 4) / 5, rel=1e-6)


def test_the_closing_newline_is_learned_once_in_every_document() -> None:
    tokenizer = Tokenizer("one\n\ntwo and more\n\n", method="byte")
    rows = frame_documents(tokenizer, ["one", "two and more"])
    newline = tokenizer.encode("\n")[0]
    batch = DocumentRowsBatchSource(rows, batch_size=2, context_size=20, random_seed=0).next_batch()
    assert batch.mask is not None
    assert ((batch.targets == newline) & batch.mask).sum(1).tolist() == [1, 1]
    assert all(row[0] == row[-1] == newline for row in rows_of(batch))
