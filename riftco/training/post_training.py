"""Post-training: supervised fine-tuning of a bundle on instruction examples, in full or through LoRA.

The loss counts every next token of the formatted text, prompt and delimiters included. The base bundle is
never changed; the result is a new one that names it as parent.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from artifacts import ModelBundle
from riftco.backends import resolve_backend
from riftco.config import PostTrainingConfig, contract_dump
from riftco.data import InstructionExample, InstructionFormatter, PlainChatFormatter, load_instructions
from riftco.errors import InputError, TokenizerError
from riftco.runtime import ModelRuntime, capture_bundle
from riftco.tokenizer import Tokenizer
from riftco.training.batches import SequenceSource
from riftco.training.document_rows import DocumentRowsBatchSource
from riftco.training.loop import MetricSink, TrainingMetric
from riftco.training.run import run_training
from riftco.training.window_batches import ExampleWindowBatchSource, SequenceWindowBatchSource

OBJECTIVE = "full_sequence_causal_sft"
_MOMENT_BYTES = 8  # two float32 moments per trained value
_SOURCES: dict[str, Callable[..., SequenceSource]] = {
    "example_uniform": ExampleWindowBatchSource,
    "window_uniform": SequenceWindowBatchSource,
    "document_rows": DocumentRowsBatchSource,
}


@dataclass(frozen=True, slots=True)
class PostTrainingResult:
    """The tuned bundle, every metric in order, and what it was tuned on and how."""

    bundle: ModelBundle
    metrics: tuple[TrainingMetric, ...]
    example_count: int
    objective: str
    fine_tuning_method: str


def post_train(
    base_bundle: ModelBundle,
    examples: Sequence[InstructionExample],
    config: PostTrainingConfig | None = None,
    *,
    formatter: InstructionFormatter | None = None,
    metric_sink: MetricSink | None = None,
) -> PostTrainingResult:
    """Fine-tune a copy of a bundle.

    InputError without examples, for a context the model does not have, for examples shorter than a window
    (by index), or for text the tokenizer cannot encode.
    """
    config = config or PostTrainingConfig()
    formatter = formatter or PlainChatFormatter()
    maximum = base_bundle.config.maximum_context
    if config.context_size > maximum:
        raise InputError(
            f"context_size {config.context_size} exceeds the model's {maximum}; use at most that"
        )
    if not examples:
        raise InputError("there are no instruction examples; give at least one")
    backend = resolve_backend(config.backend)
    with ModelRuntime.open(base_bundle, backend=backend) as runtime:
        model = runtime.model
        source = _source(runtime.tokenizer, [formatter.format(example) for example in examples], config)
        lora = config.fine_tuning_method == "lora"
        if lora:
            model.attach_lora(config.lora)
        parameters = model.adapter_parameters() if lora else model.base_parameters()
        metrics = run_training(model, parameters, source, config, metric_sink=metric_sink)
        trained_count = sum(parameter.numel() for parameter in parameters.values())
        if lora:
            model.merge_lora()
        bundle = capture_bundle(
            model,
            runtime.tokenizer,
            stage="post_training",
            parent_artifact_id=base_bundle.artifact_id,
            metadata=_metadata(config, len(examples), formatter, backend, trained_count),
        )
    return PostTrainingResult(bundle, metrics, len(examples), OBJECTIVE, config.fine_tuning_method)


def post_train_jsonl(
    base_bundle: ModelBundle,
    path: str | os.PathLike[str],
    config: PostTrainingConfig | None = None,
    *,
    formatter: InstructionFormatter | None = None,
    metric_sink: MetricSink | None = None,
) -> PostTrainingResult:
    """`post_train` on the examples of a JSONL file."""
    examples = load_instructions(path)
    return post_train(base_bundle, examples, config, formatter=formatter, metric_sink=metric_sink)


def _source(tokenizer: Tokenizer, texts: list[str], config: PostTrainingConfig) -> SequenceSource:
    try:
        sequences = tokenizer.encode_batch(texts)
    except TokenizerError as error:
        raise InputError(
            f"the instruction examples: {error}; the base bundle needs a bpe tokenizer"
        ) from None
    needed, remedy = config.context_size + 1, "use a smaller context_size or sampling_strategy document_rows"
    if config.sampling_strategy == "document_rows":  # a row may be any example with a token to predict
        needed, remedy = 2, "leave them out"
    short = [index for index, sequence in enumerate(sequences) if len(sequence) < needed]
    if short:
        indices = ", ".join(map(str, short[:8])) + (", ..." if len(short) > 8 else "")
        count = f"{len(short)} of {len(sequences)} examples"
        raise InputError(f"{count} have fewer than {needed} tokens, at index {indices}; {remedy}")
    return _SOURCES[config.sampling_strategy](
        sequences,
        batch_size=config.batch_size,
        context_size=config.context_size,
        random_seed=config.random_seed,
    )


def _metadata(
    config: PostTrainingConfig,
    example_count: int,
    formatter: InstructionFormatter,
    backend: str,
    trained_count: int,
) -> dict[str, Any]:
    lora = config.fine_tuning_method == "lora"
    return {
        "objective": OBJECTIVE,
        "example_count": example_count,
        "formatter": type(formatter).__name__,
        "training_config": contract_dump(config),
        "resolved_backend": backend,
        "optimizer": config.optimizer,
        "optimizer_state": {
            "state_storage": "contiguous",
            "page_size": config.optimizer_page_size,
            "page_count": 0,
            "state_payload_bytes": _MOMENT_BYTES * trained_count,
        },
        "optimizer_parameter_scope": "lora_adapters" if lora else "all_model_parameters",
        "fine_tuning_method": config.fine_tuning_method,
        "lora_merged": lora,
        "quantization": None,
        "adapter_state_included": False,
        "optimizer_state_included": False,
        "response_only_loss": False,
    }
