"""Training: batches, loop, optimisers, the two stages built on them, and exhaustive evaluation."""

from riftco.training.batches import BatchSource, TrainingBatch, fixed_batches
from riftco.training.document_rows import DocumentRowsBatchSource, document_batches, frame_documents
from riftco.training.evaluation import (
    CausalEvaluation,
    evaluate_instruction_examples,
    text_bits_per_byte,
    validation_bits_per_byte,
)
from riftco.training.loop import CausalLanguageModelTrainer, MetricSink, TrainingLoopConfig
from riftco.training.metrics import TrainingMetric
from riftco.training.optimizers import build_optimizer
from riftco.training.packed_rows import PackedRowsBatchSource
from riftco.training.post_training import PostTrainingResult, post_train, post_train_jsonl
from riftco.training.pretraining import (
    PretrainingResult,
    fit_tokenizer,
    pretrain_file,
    pretrain_files,
    pretrain_splits,
    pretrain_text,
)
from riftco.training.window_batches import (
    ExampleWindowBatchSource,
    RandomWindowBatchSource,
    SequenceWindowBatchSource,
)

__all__ = [
    "BatchSource",
    "CausalEvaluation",
    "CausalLanguageModelTrainer",
    "DocumentRowsBatchSource",
    "ExampleWindowBatchSource",
    "MetricSink",
    "PackedRowsBatchSource",
    "PostTrainingResult",
    "PretrainingResult",
    "RandomWindowBatchSource",
    "SequenceWindowBatchSource",
    "TrainingBatch",
    "TrainingLoopConfig",
    "TrainingMetric",
    "build_optimizer",
    "document_batches",
    "evaluate_instruction_examples",
    "fit_tokenizer",
    "fixed_batches",
    "frame_documents",
    "post_train",
    "post_train_jsonl",
    "pretrain_file",
    "pretrain_files",
    "pretrain_splits",
    "pretrain_text",
    "text_bits_per_byte",
    "validation_bits_per_byte",
]
