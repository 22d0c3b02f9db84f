"""Continuous batching over shared pages: scheduler, model runner and the thread that drives them.

`request`, `page_pool`, `sequence`, `scheduler` and `text_assembler` are pure Python: they know no tensors.
"""

from riftco.serving.engine.engine import Engine, EngineStats, QueueFullError
from riftco.serving.engine.page_pool import PagePool
from riftco.serving.engine.request import (
    Event,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from riftco.serving.engine.runner import ModelRunner
from riftco.serving.engine.scheduler import Scheduler
from riftco.serving.engine.sequence import Sequence
from riftco.serving.engine.streams import generate
from riftco.serving.engine.text_assembler import TextAssembler

__all__ = [
    "Engine",
    "EngineStats",
    "Event",
    "FinishReason",
    "GenerationRequest",
    "ModelRunner",
    "PagePool",
    "QueueFullError",
    "SamplingParams",
    "Scheduler",
    "Sequence",
    "TextAssembler",
    "TokenLogprob",
    "Usage",
    "generate",
]
