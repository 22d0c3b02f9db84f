"""What is stored: bundles, checkpoints, prepared datasets, the store of objects. No torch, no Prefect."""

from artifacts.bundle import ModelBundle
from artifacts.canonical_json import canonical_json, parse_json
from artifacts.checkpoint import TrainingCheckpoint
from artifacts.errors import ArtifactError, BundleError, CheckpointError, DatasetError, StoreError
from artifacts.files import write_atomic
from artifacts.optimizer_state import (
    AdamOptions,
    AdamState,
    AdamWOptions,
    MuonOptions,
    OptimizerScalars,
    StepState,
)
from artifacts.packed_nf4 import PackedNf4Weight, QuantizedScales
from artifacts.prepared import PreparedDataset, is_prepared_dataset, verify_prepared_dataset
from artifacts.records import Ref, RunStage, StepRecord, Tag
from artifacts.remote import RemoteStore
from artifacts.specs import ModelConfig, ParameterSpec, TokenizerSpec
from artifacts.step_key import step_key
from artifacts.store import Store
from artifacts.training_state import BatchSourceState, LoraSpec, RandomState
from artifacts.transfer import pull, push
from artifacts.workspace import Workspace

__all__ = [
    "AdamOptions",
    "AdamState",
    "AdamWOptions",
    "ArtifactError",
    "BatchSourceState",
    "BundleError",
    "CheckpointError",
    "DatasetError",
    "LoraSpec",
    "ModelBundle",
    "ModelConfig",
    "MuonOptions",
    "OptimizerScalars",
    "PackedNf4Weight",
    "ParameterSpec",
    "PreparedDataset",
    "QuantizedScales",
    "RandomState",
    "Ref",
    "RemoteStore",
    "RunStage",
    "StepRecord",
    "StepState",
    "Store",
    "StoreError",
    "Tag",
    "TokenizerSpec",
    "TrainingCheckpoint",
    "Workspace",
    "canonical_json",
    "is_prepared_dataset",
    "parse_json",
    "pull",
    "push",
    "step_key",
    "verify_prepared_dataset",
    "write_atomic",
]
