"""Instruction examples as batches: what is learned of them, rendered as serving renders prompts."""

import logging
from typing import Any

import pytest

from artifacts import ModelBundle, ModelConfig
from riftco import ModelRuntime, capture_bundle
from riftco.config import PostTrainingConfig
from riftco.data import InstructionExample, PlainChatFormatter
from riftco.errors import InputError
from riftco.model import DecoderOnlyTransformer
from riftco.serving import TextGenerator
from riftco.tokenizer import Tokenizer
from riftco.training import TrainingBatch, post_train
from riftco.training.instruction_batches import encode_examples, instruction_batches
from tests.support import FIXTURES, fixture

EXAMPLES = [
    InstructionExample(**record) for record in fixture("training.json")["post_training_full"]["examples"]
]
TALK = [
    InstructionExample(" Where is Mara? ", "Mara is in the kitchen."),
    InstructionExample("Who?", "### User:\nnobody\n### Assistant:"),
    InstructionExample("\u00a0é", "\x1c ..\n\n:: "),
    InstructionExample("Sag es mir, lang und breit und noch einmal.", "ja"),
]
CORPUS = "".join(PlainChatFormatter().format(example) for example in TALK) * 3
# Merges such as ":\n" + first letters of a response, so that whole texts and parts encode differently.
TOKENIZERS = {
    "bpe": Tokenizer(CORPUS, method="bpe", vocabulary_size=320),
    "bpe with end": Tokenizer(CORPUS, method="bpe", vocabulary_size=321, end_of_text=True),
    "byte with end": Tokenizer(CORPUS, end_of_text=True),
}
BPE = ModelBundle.load(FIXTURES / "bpe.rift")

tokenizers = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
whole_rows = pytest.mark.parametrize("strategy", ["document_rows", "packed"])


def config_of(**settings: Any) -> PostTrainingConfig:
    plain = {"batch_size": 4, "context_size": 120, "sampling_strategy": "document_rows"}
    return PostTrainingConfig.model_validate(plain | {"loss_scope": "response_only"} | settings)


def learned_texts(batch: TrainingBatch, tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of the counted targets, run by run."""
    assert batch.mask is not None
    runs: list[list[int]] = []
    for targets, chosen in zip(batch.targets.tolist(), batch.mask.tolist(), strict=True):
        for place, target in enumerate(targets):
            if chosen[place]:
                if not place or not chosen[place - 1]:
                    runs.append([])
                runs[-1].append(target)
    return [tokenizer.decode_bytes(run) for run in runs]


@tokenizers
@whole_rows
def test_what_is_learned_is_the_response_and_its_end_once(tokenizer: Tokenizer, strategy: str) -> None:
    source = instruction_batches(
        tokenizer, TALK, PlainChatFormatter(), config_of(sampling_strategy=strategy, context_size=200)
    )
    batch = source.next_batch()
    end = b"" if tokenizer.end_of_text_id is None else tokenizer.vocabulary[-1]
    golden = {
        b"Mara is in the kitchen.\n" + end,
        b"### User:\nnobody\n### Assistant:\n" + end,
        b"\x1c ..\n\n::\n" + end,
        b"ja\n" + end,
    }
    assert set(learned_texts(batch, tokenizer)) == golden


@tokenizers
def test_rows_begin_with_the_ids_a_server_prefills(tokenizer: Tokenizer) -> None:
    encoded = encode_examples(tokenizer, TALK, PlainChatFormatter(), "response_only")
    for example, (ids, context) in zip(TALK, encoded, strict=True):
        # `TextGenerator` and the command line: tokenizer.encode(PlainChatFormatter().format_prompt(prompt))
        assert ids[:context] == tokenizer.encode(PlainChatFormatter().format_prompt(example.prompt))
        body = [token for token in ids if token != tokenizer.end_of_text_id]
        assert tokenizer.decode(body) == PlainChatFormatter().format(example)


def test_ids_of_a_training_row_are_those_the_generator_reports() -> None:
    with ModelRuntime.open(BPE) as runtime:
        ((ids, context),) = encode_examples(
            runtime.tokenizer, EXAMPLES[:1], PlainChatFormatter(), "response_only"
        )
        text = PlainChatFormatter().format_prompt(EXAMPLES[0].prompt)
        served = TextGenerator(runtime.model, runtime.tokenizer).generate(text, 1)
    assert tuple(ids[:context]) == served.prompt_token_ids


def test_a_merge_across_prompt_and_response_is_undone_only_for_the_response_scope() -> None:
    tokenizer = Tokenizer("t:\nj" * 50, method="bpe", vocabulary_size=270)
    example = [InstructionExample("x", "j")]
    ((whole, whole_context),) = encode_examples(tokenizer, example, PlainChatFormatter(), "full_sequence")
    ((parts, context),) = encode_examples(tokenizer, example, PlainChatFormatter(), "response_only")
    assert whole == tokenizer.encode(PlainChatFormatter().format(example[0]))
    assert whole_context == 1
    assert whole != parts
    assert tokenizer.decode(parts[context:]) == "j\n"


@pytest.mark.parametrize("name", ["bpe with end", "byte with end"])
@pytest.mark.parametrize("scope", ["full_sequence", "response_only"])
@whole_rows
def test_the_end_of_text_token_is_learned_once_in_every_example(name: str, scope: str, strategy: str) -> None:
    tokenizer = TOKENIZERS[name]
    source = instruction_batches(
        tokenizer,
        TALK,
        PlainChatFormatter(),
        config_of(loss_scope=scope, sampling_strategy=strategy, context_size=300),
    )
    batch = source.next_batch()
    assert batch.mask is not None
    rows = source.rows_per_epoch  # type: ignore[attr-defined]
    of_epoch = ((batch.targets == tokenizer.end_of_text_id) & batch.mask)[:rows]
    assert int(of_epoch.sum()) == len(TALK)
    assert not (batch.inputs == tokenizer.end_of_text_id)[batch.mask].any()


@pytest.mark.parametrize("strategy", ["example_uniform", "window_uniform"])
def test_windows_end_with_the_end_of_text_token_too(strategy: str) -> None:
    tokenizer = TOKENIZERS["bpe with end"]
    settings = {"loss_scope": "full_sequence", "sampling_strategy": strategy, "context_size": 4}
    source = instruction_batches(tokenizer, TALK, PlainChatFormatter(), config_of(**settings))
    assert int((source.tokens == tokenizer.end_of_text_id).sum()) == len(TALK)
    assert source.tokens[-1] == tokenizer.end_of_text_id


def test_the_default_is_the_contracts_windows_over_whole_texts() -> None:
    tokenizer = TOKENIZERS["bpe"]
    source = instruction_batches(
        tokenizer, TALK, PlainChatFormatter(), PostTrainingConfig(context_size=4, batch_size=2)
    )
    texts = [PlainChatFormatter().format(example) for example in TALK]
    assert source.tokens.tolist() == [token for text in texts for token in tokenizer.encode(text)]
    assert source.next_batch().mask is None


@whole_rows
def test_a_row_of_an_example_longer_than_the_context_still_learns(strategy: str) -> None:
    tokenizer = TOKENIZERS["bpe"]
    source = instruction_batches(
        tokenizer, TALK[3:], PlainChatFormatter(), config_of(context_size=3, sampling_strategy=strategy)
    )
    for _ in range(5):
        batch = source.next_batch()
        assert batch.mask is not None
        assert bool(batch.mask.any(1).all())
        assert all(text in b"ja\n" for text in learned_texts(batch, tokenizer))


@whole_rows
def test_examples_longer_than_the_context_are_told(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "riftco")
    tokenizer = TOKENIZERS["bpe"]
    needed = sorted(
        len(ids) - 1 for ids, _ in encode_examples(tokenizer, TALK, PlainChatFormatter(), "response_only")
    )
    for context_size in needed[-1], needed[-2]:
        config = config_of(sampling_strategy=strategy, context_size=context_size)
        instruction_batches(tokenizer, TALK, PlainChatFormatter(), config)
    assert caplog.messages == [
        f"1 of 4 examples are longer than context_size {needed[-2]} (the longest needs {needed[-1]}) and are "
        "learned in pieces; raise context_size in pretraining and post-training"
    ]


class Mute(PlainChatFormatter):
    """Leaves out some responses."""

    def format(self, example: InstructionExample) -> str:
        prompt = self.format_prompt(example.prompt)
        return prompt if example.response == "ja" else super().format(example)


@whole_rows
def test_examples_without_a_token_to_learn_are_refused_with_a_count(strategy: str) -> None:
    with pytest.raises(
        InputError, match="2 of 5 examples have no response token to learn, at index 3, 4; leave them out"
    ):
        instruction_batches(
            TOKENIZERS["bpe"], [*TALK, TALK[3]], Mute(), config_of(sampling_strategy=strategy)
        )


def test_a_formatter_that_cannot_render_prompts_is_refused() -> None:
    class Whole:
        def format(self, example: InstructionExample) -> str:
            return example.prompt

    with pytest.raises(InputError, match="Whole has no format_prompt"):
        instruction_batches(TOKENIZERS["bpe"], TALK, Whole(), config_of())


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@whole_rows
def test_post_training_on_responses_says_so(method: str, strategy: str) -> None:
    config = PostTrainingConfig.model_validate(
        {
            "steps": 2,
            "context_size": 16,
            "attention": "flash",
            "activation_checkpointing": "block",
            "fine_tuning_method": method,
            "sampling_strategy": strategy,
            "loss_scope": "response_only",
        }
    )
    result = post_train(BPE, EXAMPLES, config)
    metadata = result.bundle.metadata
    assert result.objective == metadata["objective"] == "response_only_causal_sft"
    assert metadata["response_only_loss"] is True
    assert metadata["training_config"]["loss_scope"] == "response_only"
    assert post_train(BPE, EXAMPLES, config).bundle.artifact_id == result.bundle.artifact_id


def test_tuning_on_responses_teaches_answers_and_their_end() -> None:
    base = tiny_base()
    config = config_of(steps=60, context_size=100, optimizer="adamw", learning_rate=1e-2, attention="flash")
    with ModelRuntime.open(post_train(base, TALK[3:] + TALK[:1], config).bundle) as runtime:
        prompt = PlainChatFormatter().format_prompt(TALK[3].prompt)
        result = TextGenerator(runtime.model, runtime.tokenizer).generate(prompt, 20)
    assert result.text.removeprefix(prompt) == "ja\n"


def tiny_base() -> ModelBundle:
    tokenizer = TOKENIZERS["bpe with end"]
    model = DecoderOnlyTransformer(ModelConfig(tokenizer.vocab_size, 100, 32, 4, 1, 32))
    return capture_bundle(model, tokenizer, stage="pretraining")
