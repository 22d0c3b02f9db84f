"""Documents as rows or packed, and the token that ends them, from a text to a trained bundle."""

import logging

import pytest

from riftco import ModelRuntime
from riftco.config import PretrainingConfig
from riftco.errors import InputError
from riftco.serving import TextGenerator
from riftco.training import fit_tokenizer, pretrain_splits, pretrain_text
from riftco.training.text_batches import text_batches

ROWS = PretrainingConfig(
    steps=2, context_size=8, batch_size=2, validation_batch_count=1, sampling_strategy="document_rows"
)
STORIES = "\n\n".join(
    f"{who} went to the {place}." for who in ("Ann", "Bo", "Cy") for place in ("mill", "sea", "hut")
)


def test_packed_rows_train_on_the_same_documents_and_validate_as_document_rows_do() -> None:
    rows = ROWS.model_copy(update={"context_size": 64})
    packed = rows.model_copy(update={"sampling_strategy": "packed"})
    training, validation = STORIES.rsplit("\n\n", 3)[0], "Di went home.\n\nEd went home."
    results = [pretrain_splits(training, validation, config) for config in (packed, rows)]
    assert results[0].metrics[0] == results[1].metrics[0]  # validation before the first step
    counts = [result.metrics[1].token_count for result in results]
    assert counts[0] > 1.5 * counts[1]  # two rows hold more than two documents
    assert results[0].training_token_count == results[1].training_token_count
    assert results[0].bundle.metadata["training_config"]["sampling_strategy"] == "packed"
    assert results[0].bundle.artifact_id == pretrain_splits(training, validation, packed).bundle.artifact_id


@pytest.mark.parametrize("strategy", ["document_rows", "packed"])
@pytest.mark.parametrize("method", ["byte", "bpe"])
def test_a_model_with_end_of_text_learns_where_documents_end(strategy: str, method: str) -> None:
    config = PretrainingConfig(
        steps=40,
        context_size=32,
        batch_size=4,
        tokenizer_method=method,  # type: ignore[arg-type]
        vocabulary_size=270,
        model_width=32,
        feed_forward_width=64,
        optimizer="adamw",
        attention="flash",
        sampling_strategy=strategy,  # type: ignore[arg-type]
        end_of_text=True,
    )
    bundle = pretrain_splits("ab cd ef\n\nab cd\n\nab", "cd ef", config).bundle
    assert bundle.metadata["training_config"]["end_of_text"] is True
    with ModelRuntime.open(bundle) as runtime:
        assert runtime.tokenizer.end_of_text_id == runtime.tokenizer.vocab_size - 1
        result = TextGenerator(runtime.model, runtime.tokenizer).generate("\nab cd ef", 20)
    assert result.generated_token_ids == ()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_takes_long_or_cuts_documents_is_said_by_one_rank(
    rank: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "riftco")
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    settings = {"tokenizer_method": "bpe", "vocabulary_size": 256, "context_size": 20}
    config = ROWS.model_copy(update=settings)
    text_batches(STORIES, "Di went home.", fit_tokenizer(STORIES, config), config)
    longest = 1 + max(map(len, STORIES.split("\n\n")))
    long = sum(len(document) + 1 > 20 for document in STORIES.split("\n\n"))
    said = [
        f"fitting a tokenizer of 256 ids on {len(STORIES)} characters",
        f"encoding {len(STORIES) + 13} characters",
        f"{long} of 9 training documents are longer than context_size 20 (the longest needs {longest}) "
        "and are learned in pieces; raise context_size",
    ]
    assert caplog.messages == (said if rank == "0" else [])


def test_end_of_text_asks_for_an_id_and_a_tokenizer_that_has_it() -> None:
    rows = ROWS.model_copy(update={"end_of_text": True})
    with pytest.raises(
        InputError, match="vocabulary_size 256 leaves no id for end_of_text; use at least 257"
    ):
        pretrain_text(STORIES, rows.model_copy(update={"vocabulary_size": 256}))
    for config, other, has in ((rows, ROWS, "no"), (ROWS, rows, "an")):
        with pytest.raises(InputError, match=f"given has {has} end-of-text token but end_of_text is"):
            pretrain_splits(STORIES, "Di.", config, tokenizer=fit_tokenizer(STORIES, other))
