"""Settings that contradict each other are refused at once, with the remedy; each of them alone is fine."""

from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from riftco.config import (
    CorpusConfig,
    FinetuneFlowConfig,
    InstructionsConfig,
    LoraConfig,
    PipelineConfig,
    PostTrainingConfig,
    PretrainFlowConfig,
    PretrainingConfig,
    RankSweepConfig,
    ServingConfig,
    contract_dump,
)

CONTRADICTIONS: list[tuple[Any, dict[str, Any], str]] = [
    (PretrainingConfig, {"steps": 10, "warmup_steps": 10}, "warmup_steps 10 leaves nothing of the 10 steps"),
    (PretrainingConfig, {"processes": 3}, "batch_size 4 is not a multiple of processes 3"),
    (
        PretrainingConfig,
        {"optimizer": "adamw", "optimizer_state": "paged"},
        "optimizer_state paged is adam's",
    ),
    (PretrainingConfig, {"sharding": "full"}, "set processes to 2 or more"),
    (PretrainingConfig, {"sharding": "full", "processes": 2, "optimizer": "muon"}, "use adam or adamw"),
    (PretrainingConfig, {"sharding": "full", "processes": 2, "compile": True}, "use sharding none"),
    (PretrainingConfig, {"sharding": "full", "processes": 2, "sample_steps": 5}, "set sample_steps to 0"),
    (PretrainingConfig, {"head_count": 3}, "model_width 16 is not a multiple of head_count 3"),
    (PretrainingConfig, {"end_of_text": True}, "document_rows or packed, or end_of_text false"),
    (CorpusConfig, {"events": (1, 2, 1)}, r"events must be distinct, got \(1, 2, 1\)"),
    (PostTrainingConfig, {"optimizer": "muon", "fine_tuning_method": "lora"}, "use adam or adamw"),
    (
        PostTrainingConfig,
        {"sharding": "full", "processes": 2, "fine_tuning_method": "qlora"},
        "use sharding none with qlora",
    ),
    (PostTrainingConfig, {"loss_scope": "response_only"}, "use sampling_strategy document_rows or packed"),
    (
        PipelineConfig,
        {"post_training": {"fine_tuning_method": "lora", "optimizer": "adam", "lora": {"rank": 512}}},
        "post_training.lora.rank: 512 exceeds 128, a side of the model",
    ),
    (
        InstructionsConfig,
        {"validation_fraction": 0.2},
        r"validation_fraction 0.2 and .* add up to 1.17; make it 1",
    ),
]


@pytest.mark.parametrize(("config", "settings", "message"), CONTRADICTIONS)
def test_contradictions_are_refused_with_their_remedy(
    config: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**settings)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (PretrainingConfig, {"steps": 10, "warmup_steps": 9}),
        (PretrainingConfig, {"processes": 2, "sharding": "full", "optimizer": "adamw"}),
        (PretrainingConfig, {"optimizer_state": "paged"}),
        (PretrainingConfig, {"end_of_text": True, "sampling_strategy": "packed"}),
        (PostTrainingConfig, {"optimizer": "muon"}),
        (PostTrainingConfig, {"loss_scope": "response_only", "sampling_strategy": "document_rows"}),
        (InstructionsConfig, {"train_fraction": 0.7, "validation_fraction": 0.2, "test_fraction": 0.1}),
        (PipelineConfig, {}),
    ],
)
def test_what_goes_together_is_accepted(config: Any, settings: dict[str, Any]) -> None:
    config(**settings)


@pytest.mark.parametrize("flow", [PipelineConfig, PretrainFlowConfig, FinetuneFlowConfig])
def test_a_nested_mapping_changes_only_what_it_names(flow: Any) -> None:
    defaults = flow()
    for name, part in dict(defaults).items():
        if isinstance(part, BaseModel):
            assert flow.model_validate({name: {}}) == defaults
    if flow is not FinetuneFlowConfig:
        longer = flow.model_validate({"pretraining": {"steps": 1300}}).pretraining
        assert longer == defaults.pretraining.model_copy(update={"steps": 1300})
        assert flow(pretraining={"steps": 1300}).pretraining == longer


def test_a_nested_mapping_keeps_the_defaults_of_every_level_above_it() -> None:
    default = PipelineConfig().rank_sweep.training
    for sweep in (
        {"training": {"lora": {"alpha": 2.0}}},
        {"ranks": [2], "training": {"lora": {"alpha": 2.0}}},
    ):
        training = PipelineConfig.model_validate({"rank_sweep": sweep}).rank_sweep.training
        assert training == default.model_copy(update={"lora": default.lora.model_copy(update={"alpha": 2.0})})


@pytest.mark.parametrize("values", [{"pretraining": {"stepz": 1}}, {"pretraining": 5}, {"qqq": {}}])
def test_a_wrong_nested_mapping_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"stepz|pretraining|qqq"):
        PipelineConfig.model_validate(values)


def test_the_metadata_of_defaults_is_the_originals_and_what_cannot_change_a_result_is_never_in_it() -> None:
    plain = contract_dump(PretrainingConfig())
    assert {"precision", "compile", "nonfinite", "end_of_text", "checkpoint_steps"}.isdisjoint(plain)
    changed = contract_dump(PretrainingConfig(precision="bf16", checkpoint_steps=5, sample_prompt="x"))
    assert changed == plain | {"precision": "bf16"}


def defaults_of(schema: dict[str, Any]) -> Any:
    """What a form made of the schema fills in."""
    if "properties" not in schema:
        return schema["default"]
    return {name: defaults_of(part) for name, part in schema["properties"].items()}


@pytest.mark.parametrize("flow", [PipelineConfig, PretrainFlowConfig, FinetuneFlowConfig])
def test_a_form_fills_in_what_the_settings_have(flow: type[BaseModel]) -> None:
    schema = flow.model_json_schema()
    assert defaults_of(schema) == flow().model_dump(mode="json")
    assert schema["properties"]["evaluation"]["properties"]["stories"]["exclusiveMinimum"] == 0
    assert "$ref" not in str(schema)


def test_lora_alpha_is_a_float32_as_in_the_original_and_so_is_its_ratio_to_the_rank() -> None:
    tuning = PostTrainingConfig.model_validate({"lora": {"alpha": 0.001}})
    assert contract_dump(tuning)["lora"]["alpha"] == 0.0010000000474974513
    assert RankSweepConfig(alpha_over_rank=0.1).lora(3).alpha == float(np.float32(0.1 * 3))
    for alpha in (1e39, 1e-60):
        with pytest.raises(ValidationError, match="lora alpha must be a positive finite float32"):
            LoraConfig(alpha=alpha)
        with pytest.raises(ValidationError, match="alpha_over_rank times rank 2 must be a positive finite"):
            RankSweepConfig(alpha_over_rank=alpha)
    with pytest.raises(ValidationError, match="lora alpha / rank must be a positive finite float32"):
        LoraConfig(alpha=1e-45, rank=8)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (PretrainingConfig, "steps"),
        (PretrainingConfig, "loss_average_window"),
        (PretrainingConfig, "feed_forward_width"),
        (PretrainingConfig, "block_count"),
        (PostTrainingConfig, "context_size"),
    ],
)
def test_a_size_that_no_machine_can_have_is_refused(config: Any, name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name}\n.* less than or equal to 4294967295"):
        config(**{name: 10**20})


@pytest.mark.parametrize("value", [0, 1, "1", "yes"])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        (PostTrainingConfig, "double_quantization"),
        (PostTrainingConfig, "compile"),
        (PretrainingConfig, "end_of_text"),
        (ServingConfig, "prefix_cache"),
    ],
)
def test_what_is_true_or_false_is_nothing_else(config: Any, name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match="valid boolean"):
        config(**{name: value})


def test_a_rank_is_held_against_the_sides_of_what_is_adapted() -> None:
    narrow = {"model_width": 64, "feed_forward_width": 32}
    lora = {"rank": 40, "targets": ["attention.query"]}
    tuning = {"fine_tuning_method": "lora", "optimizer": "adamw"}
    for targets, fits in ((["attention.query"], True), (["feed_forward.project"], False)):
        own = tuning | {"lora": lora | {"targets": targets}}
        values = {"pretraining": narrow, "post_training": own}
        if fits:
            PipelineConfig.model_validate(values)
        else:
            with pytest.raises(ValidationError, match=r"post_training\.lora\.rank: 40 exceeds 32"):
                PipelineConfig.model_validate(values)


@pytest.mark.parametrize(
    ("optimizer", "rate"), [("adamw", "learning_rate"), ("muon", "matrix_learning_rate")]
)
def test_a_decay_of_more_than_the_whole_weight_is_refused_at_once(optimizer: str, rate: str) -> None:
    with pytest.raises(ValidationError, match=f"{rate} 0.03 with weight_decay 40.0 takes more than all"):
        PretrainingConfig.model_validate({"optimizer": optimizer, rate: 0.03, "weight_decay": 40.0})
    PretrainingConfig(learning_rate=0.03, weight_decay=40.0)  # adam decays nothing
