"""The facts of a real model, and a real run that does not feel that it is watched."""

from pathlib import Path
from typing import Any

import pytest
import torch

from riftco.config import LoraConfig, PostTrainingConfig, PretrainingConfig
from riftco.model import DecoderOnlyTransformer
from riftco.tokenizer import Tokenizer
from riftco.training import pretrain_text
from riftco.training.tracking import beginning, open_tracking, run_facts, watch
from tests.riftco.training.tracking.test_samples import TEXT, lines, model_of
from tests.riftco.training.tracking.test_tracker import rows


@pytest.mark.parametrize("adapters", [False, True])
def test_the_facts_of_a_run_are_those_of_its_model(monkeypatch: pytest.MonkeyPatch, adapters: bool) -> None:
    precisions: list[torch.dtype] = []
    rates = {torch.float32: 5e10, torch.bfloat16: 1e9}  # no bf16 unit
    monkeypatch.setattr(watch, "matrix_limit", lambda device, dtype: precisions.append(dtype) or rates[dtype])
    tokenizer = Tokenizer(TEXT, method="byte")
    model = model_of(tokenizer)
    place: Any = {"device": model.device}
    plain = run_facts(model, tokenizer, PretrainingConfig(precision="bf16"), **place, bytes_per_token=1.0)
    assert (plain.bytes_per_token, plain.matrix_limit, plain.sampler) == (1.0, 5e10, None)
    if adapters:
        model.attach_lora(LoraConfig(rank=2))
    config = PostTrainingConfig(context_size=32, sample_steps=1, sample_prompt="Zoë")
    tuning = run_facts(model, tokenizer, config, **place, bytes_per_token=None)
    assert precisions == [torch.float32, torch.bfloat16, torch.float32]
    assert tuning.sampler is not None
    assert tuning.sampler(1) == tuning.sampler(1)
    assert (tuning.flops_per_token < plain.flops_per_token) == adapters
    shared = PostTrainingConfig(context_size=32, batch_size=6, processes=3)
    assert run_facts(model, tokenizer, shared, **place, bytes_per_token=None).matrix_limit == 1.5e11


@pytest.mark.parametrize(("rate", "warned"), [(2e11, False), (1e9, True)])
def test_int8_is_held_against_its_own_rate_and_called_slow_where_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rate: float, warned: bool
) -> None:
    rates = {torch.float32: 5e10, torch.int8: rate}
    monkeypatch.setattr(watch, "matrix_limit", lambda _, dtype: rates[dtype])
    tokenizer = Tokenizer(TEXT, method="byte")
    model, config = model_of(tokenizer), PretrainingConfig(precision="int8")
    facts = run_facts(model, tokenizer, config, device=model.device, bytes_per_token=None)
    assert facts.matrix_limit == max(rates.values())
    assert ("another precision is faster" in caplog.text) == warned


def test_the_device_of_a_run_is_where_its_model_was_before_it_was_sharded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(watch, "matrix_limit", lambda device, dtype: asked.append(device) or 1e9)
    tokenizer = Tokenizer(TEXT, method="byte")
    model, config = model_of(tokenizer).to("meta"), PretrainingConfig()
    with open_tracking(config, run="book", folder=tmp_path, report=lambda *_: None) as tracking:
        begin = beginning(tracking, model, tokenizer, config)
        assert begin is not None
        model.to_empty(device="cpu")
        begin(())
    assert asked == [torch.device("meta")]


def test_tracking_a_real_run_changes_nothing_of_it(tmp_path: Path) -> None:
    config = PretrainingConfig(
        steps=6, sample_steps=2, evaluation_interval=3, vocabulary_size=260, backend="cpu"
    )
    text = "Mara was in the barn.\n\nBen was in the attic.\n\n" * 40
    alone = pretrain_text(text, config)

    with open_tracking(config, run="book", folder=tmp_path, report=lambda *_: None) as tracking:
        tokenizer = Tokenizer.from_spec(alone.bundle.tokenizer)
        model = DecoderOnlyTransformer(alone.bundle.config)
        tracking.begin(run_facts(model, tokenizer, config, device=model.device, bytes_per_token=1.5))
        watched = pretrain_text(text, config, metric_sink=tracking)
    assert watched.bundle.artifact_id == alone.bundle.artifact_id
    assert [(row["phase"], row["step"]) for row in rows(tmp_path)] == [
        (m.phase, m.step) for m in watched.metrics
    ]
    assert [row["loss"] for row in rows(tmp_path)] == [metric.loss for metric in alone.metrics]
    assert len(lines(tmp_path / "samples.jsonl")) == 3
