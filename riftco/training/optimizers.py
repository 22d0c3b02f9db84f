"""The optimiser a configuration asks for: the contract's Adam, or one of ours behind the same face."""

from collections.abc import Mapping

from torch import nn

from riftco.config import PostTrainingConfig, PretrainingConfig
from riftco.model import Adam
from riftco.training.adamw import AdamW
from riftco.training.loop import Optimizer
from riftco.training.muon import Muon


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], config: PretrainingConfig | PostTrainingConfig
) -> Optimizer:
    """The configured optimiser over these parameters, fresh."""
    rate, weight_decay = config.learning_rate, config.weight_decay
    match config.optimizer:
        case "adam":
            return Adam(parameters, learning_rate=rate)
        case "adamw":
            return AdamW(parameters, rate, weight_decay=weight_decay)
        case "muon":
            matrix_rate = config.matrix_learning_rate
            return Muon(parameters, rate, matrix_learning_rate=matrix_rate, weight_decay=weight_decay)
