"""Every stage's settings: the one source for the command line, YAML files, flows, step keys and metadata.

Models are frozen and strict: an unknown field, a bool for an integer or a text for a number is an error.
"""

from riftco.config.fields import BackendChoice, Config
from riftco.config.flows import FinetuneFlowConfig, PipelineConfig, PretrainFlowConfig
from riftco.config.serving import ServingConfig
from riftco.config.stages import CorpusConfig, EvaluationConfig, InstructionsConfig, RankSweepConfig
from riftco.config.training import (
    LORA_TARGETS,
    OPERATION,
    ActivationCheckpointing,
    AttentionKind,
    LoraConfig,
    LossScope,
    OptimizationConfig,
    PostTrainingConfig,
    PretrainingConfig,
    contract_dump,
)

__all__ = [
    "LORA_TARGETS",
    "OPERATION",
    "ActivationCheckpointing",
    "AttentionKind",
    "BackendChoice",
    "Config",
    "CorpusConfig",
    "EvaluationConfig",
    "FinetuneFlowConfig",
    "InstructionsConfig",
    "LoraConfig",
    "LossScope",
    "OptimizationConfig",
    "PipelineConfig",
    "PostTrainingConfig",
    "PretrainFlowConfig",
    "PretrainingConfig",
    "RankSweepConfig",
    "ServingConfig",
    "contract_dump",
]
