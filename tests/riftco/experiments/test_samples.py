"""Texts end where documents and answers end, and never depend on the texts beside them."""

from functools import cache

import pytest

from artifacts import ModelBundle
from riftco.config import PostTrainingConfig, PretrainingConfig
from riftco.data import InstructionExample, PlainChatFormatter
from riftco.experiments.samples import LEAST_ANSWER_TOKENS, answer_examples, sample_documents
from riftco.serving import ModelService
from riftco.training import post_train, pretrain_splits
from tests.riftco.serving.http.support import any_text_bundle
from tests.support import FIXTURES

BPE = ModelBundle.load(FIXTURES / "bpe.rift")
BYTES = any_text_bundle(context=120)  # without an end of text
LESSONS = [
    InstructionExample("Where?", "In the old tower by the river."),
    InstructionExample("Count.", "one\ntwo\nthree"),
]


def _asked(*prompts: str) -> list[InstructionExample]:
    return [InstructionExample(prompt, "yes") for prompt in prompts]


@cache
def _base() -> ModelBundle:
    """A model of documents of two lines, each with an end of text."""
    config = PretrainingConfig(
        backend="cpu",
        steps=60,
        context_size=80,
        model_width=32,
        feed_forward_width=64,
        vocabulary_size=257,
        optimizer="adamw",
        sampling_strategy="document_rows",
        end_of_text=True,
    )
    return pretrain_splits("aa\nbb\n\naa\nbb bb", "aa", config).bundle


def test_an_answer_is_the_first_line_that_greedy_generation_gives() -> None:
    prompts = ["a", "b", "it"]
    answers = answer_examples(BYTES, _asked(*prompts), lambda *_: None)
    with ModelService(BYTES) as service:
        for prompt, answer in zip(prompts, answers, strict=True):
            text = PlainChatFormatter().format_prompt(prompt)
            whole = service.generate(text, max_new_tokens=LEAST_ANSWER_TOKENS).raw_bytes[len(text.encode()) :]
            assert answer == whole.decode(errors="replace").split("\n")[0].strip()


def test_answers_of_many_tokens_and_lines_can_be_right() -> None:
    config = PostTrainingConfig(
        backend="cpu",
        steps=150,
        context_size=80,
        learning_rate=1e-2,
        optimizer="adamw",
        sampling_strategy="document_rows",
        loss_scope="response_only",
    )
    tuned = post_train(_base(), LESSONS, config).bundle
    answers = answer_examples(tuned, LESSONS, lambda *_: None)
    assert answers == [lesson.response for lesson in LESSONS]
    assert len(LESSONS[0].response) > LEAST_ANSWER_TOKENS


def test_the_same_prompt_gets_the_same_answer_wherever_it_stands() -> None:
    seen: list[tuple[int, int]] = []
    examples = _asked("Who?", "What does the river do?", "Who?")
    answers = answer_examples(BYTES, examples, lambda *done: seen.append(done))
    assert answers[0] == answers[2]
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_samples_are_a_function_of_the_seed() -> None:
    first, again, other = (sample_documents(BPE, 5, seed, lambda *_: None) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 5
    assert len(set(first)) > 1
    assert not any("\n" in line for line in first)


def test_a_sample_has_all_lines_of_a_document_that_an_end_of_text_ends() -> None:
    texts = sample_documents(_base(), 5, 1, lambda *_: None)
    assert {"aa\nbb", "aa\nbb bb"} >= set(texts)


@pytest.mark.parametrize("longer", ["prompt", "response"])
def test_what_exceeds_the_context_is_not_answered(longer: str) -> None:
    texts = {"prompt": "Who?", "response": "yes", longer: "the miller counts the grain. " * 9}
    answers = answer_examples(BYTES, [InstructionExample(**texts), *_asked("Who?")], lambda *_: None)
    assert answers[0] is None
    assert answers[1] is not None
