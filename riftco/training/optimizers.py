"""The optimiser a configuration asks for: the contract's Adam, or one of ours behind the same face."""

from collections.abc import Mapping

from torch import nn

from riftco.config import PostTrainingConfig, PretrainingConfig
from riftco.model import Adam, ModelOptimizer
from riftco.training.adamw import AdamW
from riftco.training.muon import Muon


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], config: PretrainingConfig | PostTrainingConfig
) -> ModelOptimizer:
    """The configured optimiser over these parameters, fresh."""
    rate, weight_decay = config.learning_rate, config.weight_decay
    match config.optimizer:
        case "adam":
            storage, page_size = state_storage(config), config.optimizer_page_size
            return Adam(parameters, learning_rate=rate, state_storage=storage, page_size=page_size)
        case "adamw":
            return AdamW(parameters, rate, weight_decay=weight_decay)
        case "muon":
            matrix_rate = config.matrix_learning_rate
            return Muon(parameters, rate, matrix_learning_rate=matrix_rate, weight_decay=weight_decay)


def state_storage(config: PretrainingConfig | PostTrainingConfig) -> str:
    """Where Adam keeps its moments: as configured, and `auto` is paged for qlora, else contiguous."""
    if config.optimizer_state != "auto":
        return config.optimizer_state
    return "paged" if config.fine_tuning_method == "qlora" else "contiguous"
