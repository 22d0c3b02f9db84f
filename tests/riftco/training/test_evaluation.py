"""Exhaustive scores: the original's recorded results, and every target counted exactly once."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifacts import ModelBundle, ModelConfig, TokenizerSpec
from riftco import ModelRuntime
from riftco.data import InstructionExample, PlainChatFormatter
from riftco.model import DecoderOnlyTransformer
from riftco.tokenizer import Tokenizer
from riftco.training import evaluate_instruction_examples, text_bits_per_byte, validation_bits_per_byte
from riftco.training.evaluation import _bucketed, _Chunk, token_chunks
from riftco.training.instruction_batches import encode_examples
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
    with pytest.raises(ValueError, match="none of the 1 examples has a target"):
        evaluate_instruction_examples(
            runtime.model, runtime.tokenizer, examples[:1], context_size=8, formatter=OneToken()
        )


@pytest.mark.parametrize(("context_size", "batch_size"), [(16, 1), (16, 3), (8, 4), (3, 100)])
def test_the_response_scope_scores_exactly_the_tokens_of_responses(
    runtime: ModelRuntime, context_size: int, batch_size: int
) -> None:
    encoded = encode_examples(runtime.tokenizer, EXAMPLES, PlainChatFormatter(), "response_only")
    result = evaluate_instruction_examples(
        runtime.model,
        runtime.tokenizer,
        EXAMPLES,
        context_size=context_size,
        batch_size=batch_size,
        loss_scope="response_only",
    )
    nats, count = 0.0, 0
    for ids, context in encoded:
        for start in range(0, len(ids) - 1, context_size):
            window = ids[start : start + context_size + 1]
            with torch.no_grad():
                scores = torch.log_softmax(runtime.model(torch.tensor([window[:-1]]))[0].double(), dim=-1)
            for place, token in enumerate(window[1:]):
                if start + place + 1 >= context:
                    nats, count = nats - scores[place, token].item(), count + 1
    assert result.target_token_count == count == sum(example.target_count for example in encoded)
    assert result.loss == pytest.approx(nats / count, rel=1e-6)
    assert result.usable_example_count == len(EXAMPLES)


def test_responses_share_full_batches_whatever_their_widths(runtime: ModelRuntime) -> None:
    examples = [InstructionExample("the river " * count, "x" * count) for count in range(1, 8)]
    results = [
        evaluate_instruction_examples(
            runtime.model,
            runtime.tokenizer,
            examples,
            context_size=16,
            batch_size=batch_size,
            loss_scope="response_only",
        )
        for batch_size in (1, 3, 100)
    ]
    chunks = results[0].chunk_count
    assert [result.forward_batch_count for result in results] == [chunks, -(-chunks // 3), 1]
    assert [result.loss for result in results] == pytest.approx([results[0].loss] * 3, rel=1e-6)


def test_chunks_of_a_prompt_alone_are_not_run(runtime: ModelRuntime) -> None:
    example = InstructionExample("the river runs past the mill " * 3, "x")
    ((ids, context),) = encode_examples(runtime.tokenizer, [example], PlainChatFormatter(), "response_only")
    assert context > 16
    result = evaluate_instruction_examples(
        runtime.model, runtime.tokenizer, [example], context_size=8, loss_scope="response_only"
    )
    assert result.target_token_count == len(ids) - context
    assert result.chunk_count == result.forward_batch_count <= 2


def test_the_end_of_text_token_is_scored_where_there_is_one() -> None:
    tokenizer = Tokenizer(
        "".join(example.prompt + example.response for example in EXAMPLES) + "#:\nUserAitn",
        method="bpe",
        vocabulary_size=270,
        end_of_text=True,
    )
    model = DecoderOnlyTransformer(ModelConfig(tokenizer.vocab_size, 8, 8, 2, 1, 8))
    plain = Tokenizer.from_spec(TokenizerSpec("bpe", merge_rules=tokenizer.merge_rules[:-1]))
    shorter = DecoderOnlyTransformer(ModelConfig(plain.vocab_size, 8, 8, 2, 1, 8))
    with_end, without = (
        evaluate_instruction_examples(m, t, EXAMPLES, context_size=8).target_token_count
        for m, t in ((model, tokenizer), (shorter, plain))
    )
    assert with_end == without + len(EXAMPLES)


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
    chunks = [_Chunk(torch.full((width,), index), 1) for index, width in enumerate(widths)]
    groups = list(_bucketed(chunks, batch_size))
    assert sorted(int(chunk.tokens[0]) for group in groups for chunk in group) == list(range(len(widths)))
    for group in groups:
        assert len({chunk.width for chunk in group}) == 1
        assert len(group) <= batch_size


def test_the_fullest_then_narrowest_bucket_runs_when_too_many_wait() -> None:
    def order(widths: list[int], batch_size: int) -> list[int]:
        chunks = [_Chunk(torch.zeros(width), 1) for width in widths]
        return [group[0].width for group in _bucketed(chunks, batch_size)]

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


def test_bits_per_byte_of_a_text_without_documents_count_every_token_but_the_first(
    runtime: ModelRuntime,
) -> None:
    text = "the mill\n\nthe river runs past the mill\n\n"
    ids = runtime.tokenizer.encode(text)
    byte_count = len(text) - len(runtime.tokenizer.decode_bytes(ids[:1]))
    measured = text_bits_per_byte(runtime.model, runtime.tokenizer, text, batch_size=2, context_size=8)
    assert measured == pytest.approx(bits_by_hand(runtime, ids, 8) / byte_count, rel=1e-6)
    with pytest.raises(ValueError, match="text of 1 tokens has none to score"):
        text_bits_per_byte(runtime.model, runtime.tokenizer, "t", batch_size=2, context_size=8)


def test_bits_per_byte_of_nothing_is_refused(runtime: ModelRuntime) -> None:
    with pytest.raises(ValueError, match="no documents to score"):
        validation_bits_per_byte(runtime.model, runtime.tokenizer, [], batch_size=1, context_size=8)
