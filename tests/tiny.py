"""The whole pipeline at a size that runs in seconds: it proves the wiring, not the learning."""

from typing import Any

from riftco.config import PipelineConfig
from riftco.settings import load_config

SETTINGS = (
    "name=tiny",
    "corpus.stories=60",
    "corpus.validation_fraction=0.1",
    "instructions.examples=60",
    "pretraining.steps=3",
    "pretraining.batch_size=4",
    "pretraining.context_size=160",
    "pretraining.vocabulary_size=320",
    "pretraining.model_width=16",
    "pretraining.head_count=2",
    "pretraining.block_count=1",
    "pretraining.feed_forward_width=16",
    "pretraining.warmup_steps=1",
    "post_training.steps=2",
    "post_training.batch_size=4",
    "post_training.context_size=160",
    "post_training.warmup_steps=1",
    "rank_sweep.ranks=[1, 2]",
    "rank_sweep.training.steps=2",
    "rank_sweep.training.batch_size=4",
    "rank_sweep.training.context_size=160",
    "rank_sweep.training.warmup_steps=1",
    "evaluation.stories=2",
    "evaluation.questions=3",
)


def tiny_pipeline(*assignments: Any) -> PipelineConfig:
    """The demo's settings cut down, with further `a.b=c` assignments."""
    return load_config(PipelineConfig(), None, [*SETTINGS, *assignments])
