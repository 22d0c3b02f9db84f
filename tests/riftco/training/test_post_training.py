"""Fine-tuning in full and through LoRA: the original's runs, lineage, and what is refused."""

import json
import zipfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from artifacts import ModelBundle
from kernels import dequantize_nf4
from riftco import ModelRuntime
from riftco.config import PostTrainingConfig
from riftco.data import (
    InstructionExample,
    InstructionSplits,
    PlainChatFormatter,
    freeze_instruction_formatter,
)
from riftco.errors import InputError
from riftco.model import lora
from riftco.training import (
    PostTrainingResult,
    TrainingMetric,
    evaluate_instruction_examples,
    post_train,
    post_train_jsonl,
)
from tests.riftco.training.support import assert_metrics_agree
from tests.support import FIXTURES, fixture

RECORDED = fixture("training.json")
EXAMPLES = [InstructionExample(**record) for record in RECORDED["post_training_full"]["examples"]]
SMALL = PostTrainingConfig(steps=2, context_size=8)


@pytest.fixture(scope="module")
def base() -> ModelBundle:
    return ModelBundle.load(FIXTURES / "bpe.rift")


def run(base: ModelBundle, case: dict[str, Any]) -> PostTrainingResult:
    result = post_train(base, EXAMPLES, PostTrainingConfig.model_validate(case["config"]))
    assert_metrics_agree(result.metrics, case["metrics"])
    assert result.bundle.metadata == case["metadata"]
    assert result.bundle.stage == "post_training"
    assert result.bundle.parent_artifact_id == base.artifact_id
    assert result.bundle.config == base.config
    assert result.bundle.tokenizer == base.tokenizer
    assert (result.example_count, result.objective) == (len(EXAMPLES), "full_sequence_causal_sft")
    assert result.fine_tuning_method == case["config"]["fine_tuning_method"]
    return result


def test_the_lora_run_gives_the_recorded_metrics_and_merged_weights(base: ModelBundle) -> None:
    result = run(base, RECORDED["post_training_lora"])
    child = ModelBundle.load(FIXTURES / "bpe-lora-child.rift")
    assert result.bundle.metadata == child.metadata
    np.testing.assert_allclose(result.bundle.weights, child.weights, rtol=0, atol=1e-6)
    assert np.abs(child.weights - base.weights).max() > 0.01


def test_the_qlora_run_gives_the_recorded_metrics_and_merged_weights(base: ModelBundle) -> None:
    result = run(base, RECORDED["post_training_qlora"])
    child = ModelBundle.load(FIXTURES / "bpe-qlora-child.rift")
    assert result.bundle.metadata == child.metadata
    np.testing.assert_allclose(result.bundle.weights, child.weights, rtol=0, atol=1e-6)


def test_the_full_run_gives_the_recorded_metrics(base: ModelBundle) -> None:
    run(base, RECORDED["post_training_full"])


def test_only_adapted_projections_change_under_lora(base: ModelBundle) -> None:
    config = SMALL.model_copy(update={"fine_tuning_method": "lora"})
    tensors = post_train(base, EXAMPLES, config).bundle.tensors()
    changed = {name for name, values in base.tensors().items() if not np.array_equal(values, tensors[name])}
    assert changed == {f"blocks.{b}.attention.{p}.weight" for b in (0, 1) for p in ("query", "value")}


def test_the_base_stays_as_it_was_and_the_run_repeats(base: ModelBundle) -> None:
    before = base.to_bytes()
    first, second = (post_train(base, EXAMPLES, SMALL).bundle.artifact_id for _ in range(2))
    assert first == second != base.artifact_id
    assert base.to_bytes() == before


def test_a_jsonl_file_is_its_examples(base: ModelBundle, tmp_path: Path) -> None:
    path = tmp_path / "instructions.jsonl"
    path.write_text("".join(json.dumps(example.identity) + "\n" for example in EXAMPLES))
    seen: list[TrainingMetric] = []
    result = post_train_jsonl(base, path, SMALL, metric_sink=seen.append)
    assert result.bundle.artifact_id == post_train(base, EXAMPLES, SMALL).bundle.artifact_id
    assert tuple(seen) == result.metrics


@pytest.mark.parametrize("scope", ["full_sequence", "response_only"])
def test_held_out_examples_are_scored_as_the_evaluator_does_and_change_nothing(
    base: ModelBundle, scope: Literal["full_sequence", "response_only"]
) -> None:
    config = PostTrainingConfig(
        backend="cpu",
        steps=5,
        context_size=16,
        batch_size=8,
        evaluation_interval=2,
        sampling_strategy="document_rows",
        loss_scope=scope,
    )
    held_out = [InstructionExample("Is it?", "It is."), InstructionExample("a", "b")]
    result = post_train(base, EXAMPLES, config, validation=held_out)
    losses = {m.step: m.loss for m in result.metrics if m.phase == "validation"}
    assert list(losses) == [0, 2, 4, 5]
    for step, bundle in ((0, base), (5, result.bundle)):
        with ModelRuntime.open(bundle) as runtime:
            score = evaluate_instruction_examples(
                runtime.model, runtime.tokenizer, held_out, context_size=16, batch_size=9, loss_scope=scope
            )
        assert losses[step] == pytest.approx(score.loss, rel=1e-5)
    assert result.bundle == post_train(base, EXAMPLES, config).bundle


def test_four_batches_of_held_out_examples_are_scored_and_no_more(base: ModelBundle) -> None:
    def losses(held_out: list[InstructionExample]) -> list[float]:
        metrics = post_train(base, EXAMPLES, SMALL, validation=held_out).metrics
        return [metric.loss for metric in metrics if metric.phase == "validation"]

    short = [InstructionExample("a", letter) for letter in "bcdefghijk"]
    assert len(PlainChatFormatter().format(short[0])) > 3 * SMALL.context_size  # each is several rows
    assert losses(short) == losses([*short[:8], *reversed(short)]) != losses(short[1:])


def test_validation_examples_without_a_target_are_refused(base: ModelBundle) -> None:
    with pytest.raises(InputError, match="none of the 1 validation examples has a token to score"):
        post_train(base, answers("XXXXXXXXX"), SMALL, validation=answers("X"), formatter=Bare())


def test_another_formatter_is_used_and_named(base: ModelBundle) -> None:
    class Shouting(PlainChatFormatter):
        def format(self, example: InstructionExample) -> str:
            return super().format(example).upper()

    result = post_train(base, EXAMPLES, SMALL, formatter=Shouting())
    assert result.bundle.metadata["formatter"] == "Shouting"
    splits = InstructionSplits(tuple(EXAMPLES), tuple(EXAMPLES), tuple(EXAMPLES))
    frozen = freeze_instruction_formatter(splits, Shouting())
    assert post_train(base, EXAMPLES, SMALL, formatter=frozen).bundle.artifact_id == result.bundle.artifact_id
    assert result.metrics != post_train(base, EXAMPLES, SMALL).metrics


def test_document_rows_take_whole_examples_of_any_length(base: ModelBundle) -> None:
    examples = [InstructionExample("a", "b"), *EXAMPLES]
    config = PostTrainingConfig(steps=2, context_size=16, sampling_strategy="document_rows")
    assert post_train(base, examples, config).example_count == 6


def test_a_base_that_leaves_no_room_for_the_metadata_is_refused_before_the_first_step(
    base: ModelBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = zipfile.ZipFile(FIXTURES / "bpe.rift").getinfo("manifest.json").file_size
    monkeypatch.setattr("artifacts.bundle_manifest.MAXIMUM_MANIFEST_BYTES", size)
    seen: list[TrainingMetric] = []
    with pytest.raises(InputError, match=r"vocabulary_size \d+ .* too large for a bundle"):
        post_train(base, EXAMPLES, SMALL, metric_sink=seen.append)
    assert seen == []


def test_a_context_the_model_lacks_is_refused(base: ModelBundle) -> None:
    with pytest.raises(InputError, match="context_size 17 exceeds the model's 16"):
        post_train(base, EXAMPLES, PostTrainingConfig(context_size=17))


def test_no_examples_is_refused(base: ModelBundle) -> None:
    with pytest.raises(InputError, match="no instruction examples"):
        post_train(base, [], SMALL)


class Bare(PlainChatFormatter):
    """The response alone: one token for one letter."""

    def format(self, example: InstructionExample) -> str:
        return example.response


def answers(*responses: str) -> list[InstructionExample]:
    return [InstructionExample("p", response) for response in responses]


def test_examples_shorter_than_a_window_are_refused_by_index(base: ModelBundle) -> None:
    examples = answers("XXXXXXXXX", *["XXXXXXXX"] * 9)
    with pytest.raises(
        InputError, match=r"9 of 10 .* than 9 tokens, at index 1, 2, 3, 4, 5, 6, 7, 8, \.\.\.; "
    ):
        post_train(base, examples, SMALL, formatter=Bare())
    assert post_train(base, examples[:1], SMALL, formatter=Bare()).example_count == 1


def test_rows_with_nothing_to_predict_are_refused_by_index(base: ModelBundle) -> None:
    config = SMALL.model_copy(update={"sampling_strategy": "document_rows"})
    with pytest.raises(
        InputError, match="1 of 2 examples have fewer than 2 tokens, at index 1; leave them out"
    ):
        post_train(base, answers("XX", "X"), config, formatter=Bare())


def test_text_outside_a_byte_vocabulary_is_refused() -> None:
    byte_base = ModelBundle.load(FIXTURES / "byte.rift")
    with pytest.raises(InputError, match=r"instruction examples: byte .*bpe"):
        post_train(byte_base, EXAMPLES, SMALL)


def test_adamw_and_its_scope_are_recorded(base: ModelBundle) -> None:
    config = SMALL.model_copy(update={"fine_tuning_method": "lora", "optimizer": "adamw"})
    metadata = post_train(base, EXAMPLES, config).bundle.metadata
    assert metadata["optimizer"] == metadata["training_config"]["optimizer"] == "adamw"
    assert metadata["optimizer_parameter_scope"] == "lora_adapters"


def test_qlora_rounds_every_linear_weight_and_nothing_else(base: ModelBundle) -> None:
    config = SMALL.model_copy(update={"fine_tuning_method": "qlora"})
    tensors = post_train(base, EXAMPLES, config).bundle.tensors()
    changed = {name for name, values in base.tensors().items() if not np.array_equal(values, tensors[name])}
    assert changed == {
        name for name in base.tensors() if name.endswith(".weight") and "embedding" not in name
    }


def test_plain_scales_and_contiguous_state_are_recorded(base: ModelBundle) -> None:
    update = {"fine_tuning_method": "qlora", "double_quantization": False, "optimizer_state": "contiguous"}
    metadata = post_train(base, EXAMPLES, SMALL.model_copy(update=update)).bundle.metadata
    assert metadata["quantization"]["scale_block_size"] is None
    assert metadata["quantization"]["training_memory"]["double_quantized_weight_count"] == 0
    assert metadata["optimizer_state"]["state_storage"] == "contiguous"
    assert metadata["optimizer_state"]["page_count"] == 0


@pytest.mark.parametrize("method", ["full", "lora"])
def test_pages_change_no_bit_of_the_result_and_are_counted(base: ModelBundle, method: str) -> None:
    contiguous = SMALL.model_copy(update={"fine_tuning_method": method})
    paged = contiguous.model_copy(update={"optimizer_state": "paged", "optimizer_page_size": 7})
    first, second = (post_train(base, EXAMPLES, config).bundle for config in (contiguous, paged))
    np.testing.assert_array_equal(first.weights, second.weights)
    counts = [p.count for p in base.parameters] if method == "full" else [4 * 12] * 8
    state = second.metadata["optimizer_state"]
    assert (state["state_storage"], state["page_size"]) == ("paged", 7)
    assert state["page_count"] == sum(-(-count // 7) for count in counts)
    assert state["state_payload_bytes"] == 8 * sum(counts)


def test_the_difference_that_a_merge_makes_is_measured(base: ModelBundle) -> None:
    differences = {
        method: post_train(base, EXAMPLES, SMALL.model_copy(update={"fine_tuning_method": method}))
        for method in ("full", "lora", "qlora")
    }
    assert differences["full"].merge_difference is None
    for method in ("lora", "qlora"):
        assert 0 < differences[method].merge_difference < 1e-5


def test_a_merge_into_another_base_would_show_in_the_difference(
    base: ModelBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "dequantize_nf4", lambda packed: 1.1 * dequantize_nf4(packed))
    config = SMALL.model_copy(update={"fine_tuning_method": "qlora"})
    assert post_train(base, EXAMPLES, config).merge_difference > 1e-2
