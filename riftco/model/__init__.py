"""The decoder-only transformer, its initial values, loss, optimiser, adapters and in-memory snapshot."""

from riftco.config import LoraConfig
from riftco.model.adam import Adam
from riftco.model.loss import next_token_loss
from riftco.model.optimizer import AdamStepStats, ModelOptimizer, OptimizerState
from riftco.model.snapshot import ModelSnapshot
from riftco.model.transformer import DecoderOnlyTransformer

__all__ = [
    "Adam",
    "AdamStepStats",
    "DecoderOnlyTransformer",
    "LoraConfig",
    "ModelOptimizer",
    "ModelSnapshot",
    "OptimizerState",
    "next_token_loss",
]
