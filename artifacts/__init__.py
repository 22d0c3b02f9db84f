"""What is stored: canonical JSON, `.rift` bundles, the content-addressed store. No torch, no Prefect."""

from artifacts.bundle import ModelBundle
from artifacts.canonical_json import canonical_json, parse_json
from artifacts.errors import ArtifactError, BundleError, CheckpointError, StoreError
from artifacts.files import write_atomic
from artifacts.records import Ref, RunStage, StepRecord
from artifacts.specs import ModelConfig, ParameterSpec, TokenizerSpec
from artifacts.step_key import step_key
from artifacts.store import Store

__all__ = [
    "ArtifactError",
    "BundleError",
    "CheckpointError",
    "ModelBundle",
    "ModelConfig",
    "ParameterSpec",
    "Ref",
    "RunStage",
    "StepRecord",
    "Store",
    "StoreError",
    "TokenizerSpec",
    "canonical_json",
    "parse_json",
    "step_key",
    "write_atomic",
]
