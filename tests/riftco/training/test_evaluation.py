"""Exhaustive scores: the original's recorded results, and every target counted exactly once."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifacts import ModelBundle
from riftco import ModelRuntime
from riftco.data import InstructionExample
from riftco.training import evaluate_instruction_examples, validation_bits_per_byte
from riftco.training.evaluation import _bucketed, token_chunks
from tests.support import FIXTURES, fixture

RECORDS = fixture("training.json")["post_training_full"]["examples"]
EXAMPLES = [InstructionExample(**record) for record in RECORDS]


@pytest.fixture(scope="module")
def runtime() -> ModelRuntime:
    return ModelRuntime.open(ModelBundle.load(FIXTURES / "bpe.rift"))


@pytest.mark.parametrize(
    "case",
    fixture("batching.json")["evaluator"]["results"],
    ids=lambda case: f"context {case['context_size']}, batch {case['batch_size']}",
)
def test_the_evaluator_gives_the_recorded_results(runtime: ModelRuntime, case: dict) -> None:
    result = evaluate_instruction_examples(
        runtime.model,
        runtime.tokenizer,
        EXAMPLES,
        context_size=case["context_size"],
        batch_size=case["batch_size"],
    )
    counts = [name for name in case if name.endswith("_count")]
    assert {name: getattr(result, name) for name in counts} == {name: case[name] for name in counts}
    assert result.loss == pytest.approx(case["loss"], rel=1e-6)
    assert result.perplexity == math.exp(result.loss)
    assert result.elapsed_seconds > 0


def test_evaluation_neither_updates_nor_leaves_gradients(runtime: ModelRuntime) -> None:
    weights = [p.clone() for p in runtime.model.parameters()]
    evaluate_instruction_examples(runtime.model, runtime.tokenizer, EXAMPLES, context_size=8)
    assert all(now.equal(then) for now, then in zip(runtime.model.parameters(), weights, strict=True))
    assert all(p.grad is None for p in runtime.model.parameters())


class OneToken:
    """A formatter under which short prompts have one token."""

    def format(self, example: InstructionExample) -> str:
        return example.prompt


def test_examples_with_nothing_to_predict_are_skipped_and_counted(runtime: ModelRuntime) -> None:
    examples = [InstructionExample("x", "r"), InstructionExample("xyz!", "r")]
    result = evaluate_instruction_examples(
        runtime.model, runtime.tokenizer, examples, context_size=8, formatter=OneToken()
    )
    assert (result.example_count, result.usable_example_count, result.skipped_example_count) == (2, 1, 1)
    with pytest.raises(ValueError, match="none of the 1 examples has 2 tokens"):
        evaluate_instruction_examples(
            runtime.model, runtime.tokenizer, examples[:1], context_size=8, formatter=OneToken()
        )


def test_a_loss_that_is_not_finite_is_refused() -> None:
    runtime = ModelRuntime.open(ModelBundle.load(FIXTURES / "bpe.rift"))
    with torch.no_grad():
        runtime.model.language_model_head.bias[3] = math.nan
    with pytest.raises(ValueError, match="loss of a batch is nan"):
        evaluate_instruction_examples(runtime.model, runtime.tokenizer, EXAMPLES, context_size=8)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.integers(1, 12))
def test_chunks_score_every_target_once(tokens: list[int], context_size: int) -> None:
    chunks = [chunk.tolist() for chunk in token_chunks(tokens, context_size)]
    assert [token for chunk in chunks for token in chunk[1:]] == tokens[1:]
    assert all(2 <= len(chunk) <= context_size + 1 for chunk in chunks)
    assert [chunk[0] for chunk in chunks[1:]] == [chunk[-1] for chunk in chunks[:-1]]


@given(st.lists(st.integers(2, 6), max_size=30), st.integers(1, 5))
def test_buckets_hold_one_width_lose_nothing_and_stay_bounded(widths: list[int], batch_size: int) -> None:
    chunks = [torch.full((width,), index) for index, width in enumerate(widths)]
    groups = list(_bucketed(chunks, batch_size))
    assert sorted(int(row[0]) for rows in groups for row in rows) == list(range(len(widths)))
    for rows in groups:
        assert len({len(row) for row in rows}) == 1
        assert len(rows) <= batch_size


def test_the_fullest_then_narrowest_bucket_runs_when_too_many_wait() -> None:
    def order(widths: list[int], batch_size: int) -> list[int]:
        return [len(rows[0]) for rows in _bucketed([torch.zeros(w) for w in widths], batch_size)]

    assert order([5, 3, 4], 3) == [3, 4, 5]  # all equally full: the narrowest, then what is left
    assert order([3, 5, 5, 4], 4) == [5, 3, 4]  # the fullest
    assert order([5, 5], 2) == [5]  # full


def bits_by_hand(runtime: ModelRuntime, tokens: list[int], context_size: int) -> float:
    bits = 0.0
    for start in range(0, len(tokens) - 1, context_size):
        window = tokens[start : start + context_size + 1]
        with torch.no_grad():
            scores = torch.log_softmax(runtime.model(torch.tensor([window[:-1]]))[0].double(), dim=-1)
        bits -= sum(scores[place, token].item() for place, token in enumerate(window[1:])) / math.log(2)
    return bits


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_bits_per_byte_count_every_token_and_the_closing_newline(
    runtime: ModelRuntime, batch_size: int
) -> None:
    documents = ["the mill", "é", "the river runs past the mill and the miller counts the grain."]
    tokenizer = runtime.tokenizer
    context_size = 8
    total = sum(
        bits_by_hand(runtime, [10, *tokenizer.encode(document), 10], context_size) for document in documents
    )
    byte_count = sum(len(document.encode()) for document in documents) + len(documents)
    measured = validation_bits_per_byte(
        runtime.model, tokenizer, documents, batch_size=batch_size, context_size=context_size
    )
    assert measured == pytest.approx(total / byte_count, rel=1e-6)


def test_bits_per_byte_of_nothing_is_refused(runtime: ModelRuntime) -> None:
    with pytest.raises(ValueError, match="no documents to score"):
        validation_bits_per_byte(runtime.model, runtime.tokenizer, [], batch_size=1, context_size=8)
