"""Exhaustive scores: every target of every text once, no update. Long texts are scored chunk by chunk.

A chunk of tokens t[0..n) with context C starts at 0, C, 2C, ...: its inputs are t[s : e - 1], its targets
t[s + 1 : e] with e = min(s + C + 1, n). The last token of a chunk is the first input of the next, and the
context starts anew.

Full sequences share a batch if their chunks are equally wide, in the contract's order. Responses, which are
ours, share it if they are about as wide: there are many widths, and full batches take less time than padding.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from riftco.config import LossScope, PostTrainingConfig
from riftco.data import InstructionExample, InstructionFormatter, PlainChatFormatter
from riftco.errors import InputError
from riftco.model import DecoderOnlyTransformer
from riftco.tokenizer import Tokenizer
from riftco.training.batches import TrainingBatch, at_least
from riftco.training.document_rows import SEPARATOR, Span, frame_documents, padded_batch, rows_batch
from riftco.training.instruction_batches import EncodedExample, encode_examples
from riftco.training.loop import batch_loss
from riftco.training.metrics import perplexity

_VALIDATION_BATCHES = 4  # whatever the number of examples: it is done often


@dataclass(frozen=True, slots=True)
class CausalEvaluation:
    """A loss in nats per target over a set of examples, and how much work it was."""

    example_count: int
    usable_example_count: int
    skipped_example_count: int
    target_token_count: int
    chunk_count: int
    forward_batch_count: int
    loss: float
    perplexity: float
    elapsed_seconds: float


@torch.no_grad()
def evaluate_instruction_examples(
    model: DecoderOnlyTransformer,
    tokenizer: Tokenizer,
    examples: Sequence[InstructionExample],
    *,
    context_size: int,
    batch_size: int = 1,
    formatter: InstructionFormatter | None = None,
    loss_scope: LossScope = "full_sequence",
) -> CausalEvaluation:
    """Score every target of the formatted examples once: delimiters and prompts included, or responses only.

    Examples are encoded as training encodes them for that scope, so what is compared is what was trained.
    ValueError when no example has a target or a loss is not finite.
    """
    at_least(1, batch_size, "batch_size")
    started = time.perf_counter()
    encoded = encode_examples(tokenizer, examples, formatter or PlainChatFormatter(), loss_scope)
    usable = [example for example in encoded if example.target_count]
    if not usable:
        raise ValueError(f"none of the {len(encoded)} examples has a target, so there is nothing to score")
    chunks = [chunk for example in usable for chunk in _scored_chunks(example, context_size)]
    scores: list[float] = []
    groups = _bucketed if loss_scope == "full_sequence" else _by_width
    for group in groups(chunks, batch_size):
        batch = _batch(group)
        scores.append(_finite(float(batch_loss(model, batch))) * batch.counted)
    targets = sum(example.target_count for example in usable)
    loss = math.fsum(scores) / targets
    return CausalEvaluation(
        example_count=len(encoded),
        usable_example_count=len(usable),
        skipped_example_count=len(encoded) - len(usable),
        target_token_count=targets,
        chunk_count=len(chunks),
        forward_batch_count=len(scores),
        loss=loss,
        perplexity=perplexity(loss),
        elapsed_seconds=time.perf_counter() - started,
    )


def instruction_validation_batch(
    tokenizer: Tokenizer,
    examples: Sequence[InstructionExample],
    formatter: InstructionFormatter,
    config: PostTrainingConfig,
) -> TrainingBatch:
    """The first rows that `evaluate_instruction_examples` scores, at most four training batches of them.

    As one batch, whose loss is the mean over all its targets. InputError when no example has a target.
    """
    encoded = encode_examples(tokenizer, examples, formatter, config.loss_scope)
    chunks = (chunk for example in encoded for chunk in _scored_chunks(example, config.context_size))
    rows = list(islice(chunks, _VALIDATION_BATCHES * config.batch_size))
    if not rows:
        raise InputError(f"none of the {len(examples)} validation examples has a token to score; give others")
    return _batch(rows)


def validation_bits_per_byte(
    model: DecoderOnlyTransformer,
    tokenizer: Tokenizer,
    documents: Sequence[str],
    *,
    batch_size: int,
    context_size: int,
) -> float:
    """Bits per byte of framed documents: -log2 likelihood of all their targets / their bytes.

    The targets of a document are its own tokens and the one that ends it, so its bytes are its UTF-8 length
    and one more, be the end a newline or an end-of-text token. Independent of the tokenizer's piece size,
    hence comparable with an entropy of the text. ValueError without documents or when a loss is not finite.
    """
    if not documents:
        raise ValueError("there are no documents to score; give at least one")
    framed = frame_documents(tokenizer, documents)
    byte_count = sum(len(document.encode("utf-8")) + len(SEPARATOR) for document in documents)
    return _bits(model, framed, batch_size, context_size) / byte_count


def text_bits_per_byte(
    model: DecoderOnlyTransformer, tokenizer: Tokenizer, text: str, *, batch_size: int, context_size: int
) -> float:
    """Bits per byte of a text that has no documents: of all its tokens but the first, which nothing precedes.

    ValueError for a text of less than two tokens or when a loss is not finite.
    """
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise ValueError(f"a text of {len(ids)} tokens has none to score; give a longer one")
    byte_count = len(text.encode("utf-8")) - len(tokenizer.decode_bytes(ids[:1]))
    return _bits(model, [ids], batch_size, context_size) / byte_count


@torch.no_grad()
def _bits(
    model: DecoderOnlyTransformer, sequences: Sequence[Sequence[int]], batch_size: int, context_size: int
) -> float:
    """-log2 likelihood of all targets of the sequences."""
    at_least(1, batch_size, "batch_size")
    chunks = [chunk for sequence in sequences for chunk in token_chunks(sequence, context_size)]
    chunks.sort(key=len)  # rows of like length share a batch, which keeps padding small
    nats = []
    for first in range(0, len(chunks), batch_size):
        rows = chunks[first : first + batch_size]
        targets = sum(len(row) - 1 for row in rows)
        nats.append(_finite(float(batch_loss(model, rows_batch(rows)))) * targets)
    return math.fsum(nats) / math.log(2)


def token_chunks(sequence: Sequence[int], context_size: int) -> Iterator[Tensor]:
    """The chunks of one sequence as int64 rows of at most C + 1 tokens, by the rule at the top."""
    tokens = torch.as_tensor(sequence, dtype=torch.int64)
    for start in range(0, len(tokens) - 1, at_least(1, context_size, "context_size")):
        yield tokens[start : start + context_size + 1]


class _Chunk(NamedTuple):
    """At most C + 1 tokens int64, of which the first `context` (at least 1) are not scored."""

    tokens: Tensor
    context: int

    @property
    def width(self) -> int:
        return len(self.tokens)


def _scored_chunks(example: EncodedExample, context_size: int) -> Iterator[_Chunk]:
    """The chunks of an example that have something to score; a long prompt may fill whole chunks."""
    for index, tokens in enumerate(token_chunks(example.ids, context_size)):
        context = max(1, example.context - index * context_size)
        if context < len(tokens):
            yield _Chunk(tokens, context)


def _batch(chunks: Sequence[_Chunk]) -> TrainingBatch:
    """Chunks as a padded batch; without a mask where every target counts, as in the contract."""
    lengths = [chunk.width for chunk in chunks]
    contexts = [chunk.context for chunk in chunks]
    spans = list(map(Span, accumulate(lengths, initial=0), lengths, contexts))
    batch = padded_batch(torch.cat([chunk.tokens for chunk in chunks]), spans)
    return TrainingBatch(batch.inputs, batch.targets) if batch.counted == batch.targets.numel() else batch


def _by_width(chunks: Sequence[_Chunk], batch_size: int) -> Iterator[Sequence[_Chunk]]:
    """Full groups of chunks of like width, narrow ones first."""
    ordered = sorted(chunks, key=lambda chunk: chunk.width)
    for first in range(0, len(ordered), batch_size):
        yield ordered[first : first + batch_size]


def _bucketed(chunks: Sequence[_Chunk], batch_size: int) -> Iterator[list[_Chunk]]:
    """Groups of equally wide chunks, in the contract's order of evaluation.

    A bucket runs when it is full; else the fullest (then narrowest) runs once batch_size chunks wait over
    all of them, which bounds the memory. What is left runs by ascending width.
    """
    buckets: defaultdict[int, list[_Chunk]] = defaultdict(list)
    for chunk in chunks:
        buckets[chunk.width].append(chunk)
        if len(buckets[chunk.width]) == batch_size:
            yield buckets.pop(chunk.width)
        elif sum(map(len, buckets.values())) >= batch_size:
            yield buckets.pop(max(buckets, key=lambda width: (len(buckets[width]), -width)))
    for width in sorted(buckets):
        yield buckets[width]


def _finite(loss: float) -> float:
    if not math.isfinite(loss):
        raise ValueError(f"the loss of a batch is {loss}; the model's weights are damaged or diverged")
    return loss
