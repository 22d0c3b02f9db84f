"""From instruction examples to batches: rendered, encoded, checked, and sampled as configured.

With `response_only` the prompt is encoded alone, exactly as a server encodes it before it answers, and the
response after it; then no token lies half in each, and what the model is asked at serving is what it was
trained on. The end-of-text token of a base that has one closes every example.
"""

from collections.abc import Sequence
from typing import NamedTuple

from riftco.config import LossScope, PostTrainingConfig
from riftco.data import InstructionExample, InstructionFormatter, format_parts
from riftco.errors import InputError, TokenizerError
from riftco.tokenizer import Tokenizer
from riftco.training.batches import SequenceSource
from riftco.training.document_rows import DocumentRowsBatchSource, log_pieces
from riftco.training.packed_rows import PackedRowsBatchSource
from riftco.training.window_batches import ExampleWindowBatchSource, SequenceWindowBatchSource

_WINDOWS = {"example_uniform": ExampleWindowBatchSource, "window_uniform": SequenceWindowBatchSource}
_WHOLE = {"document_rows": DocumentRowsBatchSource, "packed": PackedRowsBatchSource}


class EncodedExample(NamedTuple):
    """Token ids, and how many of the first are only context: the prompt's, or the one nothing precedes."""

    ids: list[int]
    context: int

    @property
    def target_count(self) -> int:
        """How many tokens are learned."""
        return max(0, len(self.ids) - self.context)


def encode_examples(
    tokenizer: Tokenizer,
    examples: Sequence[InstructionExample],
    formatter: InstructionFormatter,
    loss_scope: LossScope,
) -> list[EncodedExample]:
    """Each example as the model is trained on it. TokenizerError for text outside the vocabulary."""
    end = [] if tokenizer.end_of_text_id is None else [tokenizer.end_of_text_id]
    if loss_scope == "full_sequence":
        texts = [formatter.format(example) for example in examples]
        return [EncodedExample(ids + end, 1) for ids in tokenizer.encode_batch(texts)]
    encoded = []
    for example in examples:
        prompt, response = (tokenizer.encode(part) for part in format_parts(formatter, example))
        encoded.append(EncodedExample(prompt + response + end, max(1, len(prompt))))
    return encoded


def instruction_batches(
    tokenizer: Tokenizer,
    examples: Sequence[InstructionExample],
    formatter: InstructionFormatter,
    config: PostTrainingConfig,
) -> SequenceSource:
    """The examples as `sampling_strategy` and `loss_scope` say.

    InputError for text outside the vocabulary, and for examples with too few tokens or none to learn (by
    index).
    """
    strategy = config.sampling_strategy
    try:
        encoded = encode_examples(tokenizer, examples, formatter, config.loss_scope)
    except TokenizerError as error:
        raise InputError(
            f"the instruction examples: {error}; the base bundle needs a bpe tokenizer"
        ) from None
    sizes = {"batch_size": config.batch_size, "context_size": config.context_size}
    ids = [example.ids for example in encoded]
    if strategy in _WINDOWS:
        needed = config.context_size + 1
        _refuse(
            [len(example.ids) < needed for example in encoded],
            f"have fewer than {needed} tokens",
            "use a smaller context_size or sampling_strategy document_rows",
        )
        return _WINDOWS[strategy](ids, random_seed=config.random_seed, **sizes)
    learned = "fewer than 2 tokens" if config.loss_scope == "full_sequence" else "no response token to learn"
    _refuse([not example.target_count for example in encoded], f"have {learned}", "leave them out")
    remedy = "raise context_size in pretraining and post-training"
    log_pieces(ids, config.context_size, what="examples", remedy=remedy)
    contexts = [example.context for example in encoded]
    return _WHOLE[strategy](ids, contexts=contexts, random_seed=config.random_seed, **sizes)


def _refuse(wrong: Sequence[bool], what: str, remedy: str) -> None:
    indices = [index for index, is_wrong in enumerate(wrong) if is_wrong]
    if indices:
        shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
        raise InputError(f"{len(indices)} of {len(wrong)} examples {what}, at index {shown}; {remedy}")
