"""Post-training: supervised fine-tuning of a bundle on instruction examples, in full, by LoRA or by QLoRA.

The loss counts every next token of the formatted text, prompt and delimiters included, or with `loss_scope`
response_only those of the response alone. The base bundle is never changed; the result is a new one that
names it as parent.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from artifacts import ModelBundle, Workspace, canonical_json
from artifacts.optimizer_state import is_muon_matrix
from riftco.backends import resolve_backend
from riftco.config import PostTrainingConfig, contract_dump
from riftco.data import (
    InstructionExample,
    InstructionFormatter,
    PlainChatFormatter,
    formatter_name,
    load_instructions,
)
from riftco.errors import InputError
from riftco.model import DecoderOnlyTransformer
from riftco.runtime import ModelRuntime, capture_bundle, require_bundle_fits
from riftco.training.evaluation import instruction_validation_batch
from riftco.training.instruction_batches import instruction_batches
from riftco.training.loop import MetricSink, TrainingMetric
from riftco.training.optimizers import state_storage
from riftco.training.ranks import trains_here
from riftco.training.run import run_training
from riftco.training.tracking import beginning

OBJECTIVES = {"full_sequence": "full_sequence_causal_sft", "response_only": "response_only_causal_sft"}
Metadata = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PostTrainingResult:
    """The tuned bundle, every metric in order, and what it was tuned on and how.

    `merge_difference`: the largest change of a logit by the merge of adapters, over one row of training data.
    """

    bundle: ModelBundle
    metrics: tuple[TrainingMetric, ...]
    example_count: int
    objective: str
    fine_tuning_method: str
    merge_difference: float | None = None


def post_train(
    base_bundle: ModelBundle,
    examples: Sequence[InstructionExample],
    config: PostTrainingConfig | None = None,
    *,
    validation: Sequence[InstructionExample] = (),
    formatter: InstructionFormatter | None = None,
    metric_sink: MetricSink | None = None,
    workspace: Workspace | None = None,
) -> PostTrainingResult:
    """Fine-tune a copy of a bundle.

    The loss of the first `validation` examples, of four batches at most, is recorded before the first step,
    after each divisible by `evaluation_interval` and after the last; it changes nothing else.

    InputError without examples, for a context the model does not have, for examples shorter than a window or
    without a token to learn (by index), for validation examples without one, or for text the tokenizer cannot
    encode.
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
    if not trains_here(config, backend):
        from riftco.training.jobs import post_train_in_ranks

        return post_train_in_ranks(
            base_bundle,
            examples,
            config,
            validation=validation,
            formatter=formatter,
            metric_sink=metric_sink,
            workspace=workspace,
        )
    with ModelRuntime.open(base_bundle, backend=backend) as runtime:
        model = runtime.model
        source = instruction_batches(runtime.tokenizer, examples, formatter, config)
        held_out = []
        if validation:
            held_out.append(instruction_validation_batch(runtime.tokenizer, validation, formatter, config))
        quantization = _attach_adapters(model, config)
        parent = base_bundle.artifact_id
        with model.base_parameters() if model.lora is None else model.adapter_parameters() as parameters:
            metadata = _metadata(config, len(examples), formatter, backend) | {
                "optimizer_state": _optimizer_state(parameters, config),
                "quantization": quantization,
            }
            require_bundle_fits(
                model.config,
                runtime.tokenizer,
                stage="post_training",
                parent_artifact_id=parent,
                metadata=metadata,
            )
            metrics = run_training(
                model,
                parameters,
                source,
                config,
                inputs={"base": parent, "validation": _digest(validation)},
                validation_batches=held_out,
                metric_sink=metric_sink,
                begin=beginning(metric_sink, model, runtime.tokenizer, config),
                workspace=workspace,
            )
        merge_difference = None if model.lora is None else _merge(model, source.next_batch().inputs[:1])
        bundle = capture_bundle(
            model,
            runtime.tokenizer,
            stage="post_training",
            parent_artifact_id=parent,
            metadata=metadata,
        )
    return PostTrainingResult(
        bundle,
        metrics,
        len(examples),
        OBJECTIVES[config.loss_scope],
        config.fine_tuning_method,
        merge_difference,
    )


def post_train_jsonl(
    base_bundle: ModelBundle,
    path: str | os.PathLike[str],
    config: PostTrainingConfig | None = None,
    *,
    validation_path: str | os.PathLike[str] | None = None,
    formatter: InstructionFormatter | None = None,
    metric_sink: MetricSink | None = None,
    workspace: Workspace | None = None,
) -> PostTrainingResult:
    """`post_train` on the examples of a JSONL file, and validated on those of another."""
    examples = load_instructions(path)
    validation = () if validation_path is None else load_instructions(validation_path)
    return post_train(
        base_bundle,
        examples,
        config,
        validation=validation,
        formatter=formatter,
        metric_sink=metric_sink,
        workspace=workspace,
    )


def _digest(examples: Sequence[InstructionExample]) -> str:
    return hashlib.sha256(canonical_json([example.identity for example in examples])).hexdigest()


def _attach_adapters(model: DecoderOnlyTransformer, config: PostTrainingConfig) -> Metadata | None:
    """Quantize and attach as the method says; the bundle's `quantization`."""
    quantization = None
    if config.fine_tuning_method == "qlora":
        double, scale_block_size = config.double_quantization, config.nf4_scale_block_size
        model.quantize_nf4(
            config.nf4_block_size, double_quantization=double, scale_block_size=scale_block_size
        )
        memory = model.quantized_memory()
        quantization = {
            "format": "nf4",
            "block_size": config.nf4_block_size,
            "double_quantization": double,
            "scale_block_size": scale_block_size if double else None,
            "training_memory": asdict(memory) | {"compression_ratio": memory.compression_ratio},
            "export_materialized_to_fp32": True,
        }
    if config.fine_tuning_method != "full":
        model.attach_lora(config.lora)
    return quantization


@torch.no_grad()
def _merge(model: DecoderOnlyTransformer, token_ids: Tensor) -> float:
    """Fold the adapters in; the largest difference that makes to a logit of these tokens."""
    adapted = model(token_ids)
    model.merge_lora()
    return float((model(token_ids) - adapted).abs().max())


def _optimizer_state(parameters: Mapping[str, nn.Parameter], config: PostTrainingConfig) -> Metadata:
    counts, page_size = [parameter.numel() for parameter in parameters.values()], config.optimizer_page_size
    storage = state_storage(config) if config.optimizer == "adam" else "contiguous"
    return {
        "state_storage": storage,
        "page_size": page_size,
        "page_count": sum(-(-count // page_size) for count in counts) if storage == "paged" else 0,
        "state_payload_bytes": sum(_moment_bytes(name, p, config) for name, p in parameters.items()),
    }


def _moment_bytes(name: str, parameter: nn.Parameter, config: PostTrainingConfig) -> int:
    """Two float32 moments for each value, one where Muon moves a matrix."""
    moments = 1 if config.optimizer == "muon" and is_muon_matrix(name, parameter.ndim) else 2
    return 4 * moments * parameter.numel()


def _metadata(
    config: PostTrainingConfig, example_count: int, formatter: InstructionFormatter, backend: str
) -> Metadata:
    adapters = config.fine_tuning_method != "full"
    return {
        "objective": OBJECTIVES[config.loss_scope],
        "example_count": example_count,
        "formatter": formatter_name(formatter),
        "training_config": contract_dump(config),
        "resolved_backend": backend,
        "optimizer": config.optimizer,
        "optimizer_parameter_scope": "lora_adapters" if adapters else "all_model_parameters",
        "fine_tuning_method": config.fine_tuning_method,
        "lora_merged": adapters,
        "adapter_state_included": False,
        "optimizer_state_included": False,
        "response_only_loss": config.loss_scope == "response_only",
    }
