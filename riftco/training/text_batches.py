"""From a training and a validation text to batches: encoded, checked, and sampled as configured."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from riftco.config import PretrainingConfig
from riftco.data import split_documents
from riftco.errors import InputError, TokenizerError
from riftco.log import LOGGER
from riftco.tokenizer import Tokenizer
from riftco.training.batches import BatchSource, TrainingBatch, fixed_batches
from riftco.training.document_rows import (
    SEPARATOR,
    DocumentRowsBatchSource,
    document_batches,
    frame_documents,
    log_pieces,
)
from riftco.training.packed_rows import PackedRowsBatchSource
from riftco.training.ranks import is_leader
from riftco.training.window_batches import RandomWindowBatchSource


@dataclass(frozen=True, slots=True)
class TextBatches:
    """An endless source of training batches, fixed validation batches, and the tokens on either side.

    With `document_rows` and `packed` a document counts its own tokens and the one that ends it.
    """

    source: BatchSource
    validation: Sequence[TrainingBatch]
    training_token_count: int
    validation_token_count: int


def text_batches(
    training: str, validation: str, tokenizer: Tokenizer, config: PretrainingConfig
) -> TextBatches:
    """Batches of the two texts as `sampling_strategy` says.

    InputError when a side is too short for the context, holds a byte the vocabulary lacks, or (with
    `document_rows` and `packed`) has no document or shares one with the other side.
    """
    if is_leader():
        LOGGER.info(f"encoding {len(training) + len(validation):,} characters")
    if config.sampling_strategy == "random_window":
        return _random_windows(training, validation, tokenizer, config)
    return _documents(training, validation, tokenizer, config)


def text_bytes(text: str, config: PretrainingConfig) -> int:
    """The bytes that a text's tokens stand for: with documents, those of each and one for what ends it."""
    if config.sampling_strategy == "random_window":
        return len(text.encode())
    return sum(len(document.encode()) + len(SEPARATOR) for document in split_documents(text))


def _random_windows(
    training: str, validation: str, tokenizer: Tokenizer, config: PretrainingConfig
) -> TextBatches:
    tokens = _window_tokens("training", training, tokenizer, config)
    held_out = _window_tokens("validation", validation, tokenizer, config)
    sizes = {"batch_size": config.batch_size, "context_size": config.context_size}
    validation_source = RandomWindowBatchSource(held_out, random_seed=config.validation_random_seed, **sizes)
    return TextBatches(
        RandomWindowBatchSource(tokens, random_seed=config.random_seed, **sizes),
        fixed_batches(validation_source, config.validation_batch_count),
        len(tokens),
        len(held_out),
    )


def _documents(
    training: str, validation: str, tokenizer: Tokenizer, config: PretrainingConfig
) -> TextBatches:
    """Whole documents to learn; the validation documents are padded rows in order with either strategy."""
    documents, held_out_documents = split_documents(training), split_documents(validation)
    _refuse_shared(documents, held_out_documents)
    rows = _document_tokens("training", documents, tokenizer)
    held_out = _document_tokens("validation", held_out_documents, tokenizer)
    batch_size, context_size = config.batch_size, config.context_size
    log_pieces(rows, context_size, what="training documents", remedy="raise context_size")
    source = PackedRowsBatchSource if config.sampling_strategy == "packed" else DocumentRowsBatchSource
    scored = held_out[: config.validation_batch_count * batch_size]
    return TextBatches(
        source(rows, batch_size=batch_size, context_size=context_size, random_seed=config.random_seed),
        document_batches(scored, batch_size=batch_size, context_size=context_size),
        sum(len(row) - 1 for row in rows),
        sum(len(row) - 1 for row in held_out),
    )


def _window_tokens(side: str, text: str, tokenizer: Tokenizer, config: PretrainingConfig) -> list[int]:
    with _naming(side):
        tokens = tokenizer.encode(text)
    if len(tokens) <= config.context_size:
        raise InputError(
            f"the {side} text has {len(tokens)} tokens and a context of {config.context_size} needs "
            f"{config.context_size + 1}; use a smaller context_size or more text"
        )
    return tokens


def _document_tokens(side: str, documents: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    if not documents:
        raise InputError(f"the {side} text has no documents; write text with blank lines between documents")
    with _naming(side):
        return frame_documents(tokenizer, documents)


def _refuse_shared(training: Sequence[str], validation: Sequence[str]) -> None:
    seen = {document.strip() for document in training}
    if shared := sum(document.strip() in seen for document in validation):
        raise InputError(
            f"{shared} of {len(validation)} validation documents are training documents too; "
            "remove repeated documents before splitting the text"
        )


@contextmanager
def _naming(side: str) -> Iterator[None]:
    """Say which text could not be encoded; the tokenizer says why and what would help."""
    try:
        yield
    except TokenizerError as error:
        raise InputError(f"the {side} text: {error}") from None
