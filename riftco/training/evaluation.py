"""Exhaustive scores: every target of every text once, no update. Long texts are scored chunk by chunk.

A chunk of tokens t[0..n) with context C starts at 0, C, 2C, ...: its inputs are t[s : e - 1], its targets
t[s + 1 : e] with e = min(s + C + 1, n). The last token of a chunk is the first input of the next, and the
context starts anew.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from riftco.data import InstructionExample, InstructionFormatter, PlainChatFormatter
from riftco.model import DecoderOnlyTransformer
from riftco.tokenizer import Tokenizer
from riftco.training.batches import TrainingBatch, at_least
from riftco.training.document_rows import SEPARATOR, frame_documents, rows_batch
from riftco.training.loop import batch_loss, perplexity


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
) -> CausalEvaluation:
    """Score every target of the formatted examples once, delimiters and prompts included.

    Chunks of one width share a batch. ValueError when no example has two tokens or a loss is not finite.
    """
    at_least(1, batch_size, "batch_size")
    started = time.perf_counter()
    formatter = formatter or PlainChatFormatter()
    sequences = tokenizer.encode_batch([formatter.format(example) for example in examples])
    usable = [sequence for sequence in sequences if len(sequence) >= 2]
    if not usable:
        raise ValueError(f"none of the {len(sequences)} examples has 2 tokens, so there is nothing to score")
    chunks = [chunk for sequence in usable for chunk in token_chunks(sequence, context_size)]
    scores: list[float] = []
    for rows in _bucketed(chunks, batch_size):
        batch = TrainingBatch.shifted(torch.stack(rows))
        scores.append(_finite(float(batch_loss(model, batch))) * batch.targets.numel())
    targets = sum(len(chunk) - 1 for chunk in chunks)
    loss = math.fsum(scores) / targets
    return CausalEvaluation(
        example_count=len(sequences),
        usable_example_count=len(usable),
        skipped_example_count=len(sequences) - len(usable),
        target_token_count=targets,
        chunk_count=len(chunks),
        forward_batch_count=len(scores),
        loss=loss,
        perplexity=perplexity(loss),
        elapsed_seconds=time.perf_counter() - started,
    )


@torch.no_grad()
def validation_bits_per_byte(
    model: DecoderOnlyTransformer,
    tokenizer: Tokenizer,
    documents: Sequence[str],
    *,
    batch_size: int,
    context_size: int,
) -> float:
    """Bits per byte of framed documents: -log2 likelihood of all their targets / their bytes.

    The targets of a document are its own tokens and the closing separator, so its bytes are its UTF-8 length
    plus the separator's. Independent of the tokenizer's piece size, hence comparable with an entropy of the
    text. ValueError without documents or when a loss is not finite.
    """
    at_least(1, batch_size, "batch_size")
    if not documents:
        raise ValueError("there are no documents to score; give at least one")
    framed = frame_documents(tokenizer, documents)
    chunks = [chunk for sequence in framed for chunk in token_chunks(sequence, context_size)]
    chunks.sort(key=len)  # rows of like length share a batch, which keeps padding small
    nats = []
    for first in range(0, len(chunks), batch_size):
        rows = chunks[first : first + batch_size]
        targets = sum(len(row) - 1 for row in rows)
        nats.append(_finite(float(batch_loss(model, rows_batch(rows)))) * targets)
    byte_count = sum(len(document.encode("utf-8")) + len(SEPARATOR) for document in documents)
    return math.fsum(nats) / math.log(2) / byte_count


def token_chunks(sequence: Sequence[int], context_size: int) -> Iterator[Tensor]:
    """The chunks of one sequence as int64 rows of at most C + 1 tokens, by the rule at the top."""
    tokens = torch.as_tensor(sequence, dtype=torch.int64)
    for start in range(0, len(tokens) - 1, at_least(1, context_size, "context_size")):
        yield tokens[start : start + context_size + 1]


def _bucketed(chunks: Sequence[Tensor], batch_size: int) -> Iterator[list[Tensor]]:
    """Groups of equally wide chunks, in the contract's order of evaluation.

    A bucket runs when it is full; else the fullest (then narrowest) runs once batch_size chunks wait over
    all of them, which bounds the memory. What is left runs by ascending width.
    """
    buckets: defaultdict[int, list[Tensor]] = defaultdict(list)
    for chunk in chunks:
        buckets[len(chunk)].append(chunk)
        if len(buckets[len(chunk)]) == batch_size:
            yield buckets.pop(len(chunk))
        elif sum(map(len, buckets.values())) >= batch_size:
            yield buckets.pop(max(buckets, key=lambda width: (len(buckets[width]), -width)))
    for width in sorted(buckets):
        yield buckets[width]


def _finite(loss: float) -> float:
    if not math.isfinite(loss):
        raise ValueError(f"the loss of a batch is {loss}; the model's weights are damaged or diverged")
    return loss
