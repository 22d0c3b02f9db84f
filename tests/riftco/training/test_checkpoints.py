"""A run goes on from its checkpoint: the original's runs, and ours bit for bit from any step."""

import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import TrainingCheckpoint
from riftco.config import LoraConfig
from riftco.model import Adam, DecoderOnlyTransformer
from riftco.training import (
    CausalLanguageModelTrainer,
    ExampleWindowBatchSource,
    RandomWindowBatchSource,
    TrainingLoopConfig,
)
from riftco.training.checkpoints import TrainingCheckpointRestore, capture, restore
from tests.riftco.training.runs import METHODS, OPTIMIZERS, Run, bytes_of, new_run
from tests.support import FIXTURES, fixture, float32_tensor

NAMES = ("full", "lora", "qlora", "full-v1")
RECORDED = fixture("checkpoints.json")
SIZES = {"batch_size": 2, "context_size": 5, "random_seed": 1}
STEPS = 5


def restored(name: str, *, alike: bool = False) -> tuple[Run, TrainingCheckpoint, TrainingCheckpointRestore]:
    """A fixture of the original, put into fresh objects: alike, or of other seeds, block sizes and pages."""
    checkpoint = TrainingCheckpoint.load(FIXTURES / f"{name}.riftckpt")
    recorded = RECORDED[f"{name.removesuffix('-v1')}.riftckpt"]
    config, options, lora = checkpoint.config, checkpoint.optimizer.options, checkpoint.lora
    model = DecoderOnlyTransformer(config if alike else replace(config, random_seed=99))
    if checkpoint.packed_weights:
        model.quantize_nf4(64, double_quantization=False)
    if lora:
        seed = lora.random_seed if alike else 77
        model.attach_lora(LoraConfig(rank=2, alpha=4.0, targets=lora.targets, random_seed=seed))
    pages = {"state_storage": options.state_storage, "page_size": options.page_size}
    parameters = model.adapter_parameters() if lora else model.base_parameters()
    optimizer = Adam(parameters, 0.01, **(pages if alike else {"state_storage": "paged", "page_size": 3}))
    source = (
        ExampleWindowBatchSource(recorded["sequences"], **SIZES)
        if recorded["sequences"]
        else RandomWindowBatchSource(recorded["tokens"], **SIZES)
    )
    return Run(model, optimizer, source), checkpoint, restore(checkpoint, model, optimizer, source)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_the_original_goes_on_as_it_did_there(name: str) -> None:
    run, checkpoint, done = restored(name)
    recorded = RECORDED[f"{name.removesuffix('-v1')}.riftckpt"]
    assert [random.random() for _ in range(3)] == recorded["python_random_next"]
    assert done == TrainingCheckpointRestore(checkpoint.checkpoint_id, 105, 5)
    trainer = CausalLanguageModelTrainer(run.model, run.optimizer)
    metrics = trainer.train(run.source, TrainingLoopConfig(4))
    assert [metric.step for metric in metrics] == [row["step"] for row in recorded["after"]]
    for metric, row in zip(metrics, recorded["after"], strict=True):
        for key in ("loss", "gradient_norm", "clip_scale"):
            assert getattr(metric, key) == pytest.approx(row[key], rel=1e-6), (metric, key)
    state = run.optimizer.state()
    assert state.scalars.step_count == recorded["final_step"]
    assert state.scalars.beta1_power == recorded["final_beta1_power"]
    assert state.scalars.beta2_power == recorded["final_beta2_power"]
    for part in ("values", "first_moments", "second_moments"):
        key = f"final_{'optimizer_' if part == 'values' else ''}{part}_f32le_base64"
        difference = np.abs(getattr(state, part) - float32_tensor(recorded[key]).numpy())
        difference[_key_biases(checkpoint)] = 0  # their gradient is rounding noise, which Adam makes visible
        assert difference.max() < 1e-6, part
    assert run.source.next_batch().inputs.tolist() == recorded["next_batch_inputs"]
    if checkpoint.packed_weights:
        packed = zip(run.model.packed_state(), checkpoint.packed_weights, strict=True)
        assert all(ours.encode() == theirs.encode() for ours, theirs in packed)


def _key_biases(checkpoint: TrainingCheckpoint) -> np.ndarray:
    trained = checkpoint.trained_parameters
    return np.concatenate([np.full(p.count, p.name.endswith("attention.key.bias")) for p in trained])


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_run_of_the_original_is_captured_as_the_same_checkpoint(name: str) -> None:
    run, checkpoint, done = restored(name, alike=True)
    again = capture(
        run.model,
        run.optimizer,
        source=run.source,
        global_step=done.global_step,
        metadata=checkpoint.metadata,
    )
    original = f"{name.removesuffix('-v1')}.riftckpt"  # what is captured is version 2
    assert again.checkpoint_id == RECORDED[original]["checkpoint_id"]
    assert again.to_bytes() == (FIXTURES / original).read_bytes()


@functools.cache
def uninterrupted(method: str, optimizer: str) -> tuple[Any, ...]:
    """The metrics of a whole run, its bytes at the end, its next batch, and Python's next random number."""
    random.seed(5)
    run = new_run(method, optimizer)
    metrics, ending = run.train(STEPS), bytes_of(run)
    return metrics, ending, run.source.next_batch().inputs.tolist(), random.random()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@given(kept=st.integers(0, STEPS))
@settings(max_examples=3, deadline=None)
def test_a_run_interrupted_at_any_step_ends_as_one_that_was_not(
    method: str, optimizer: str, kept: int
) -> None:
    expected, ending, next_inputs, next_random = uninterrupted(method, optimizer)
    random.seed(5)
    first = new_run(method, optimizer)
    metrics = first.train(kept)
    data = capture(first.model, first.optimizer, source=first.source).to_bytes()

    random.seed(6)
    second = new_run(method, optimizer, seed=8)
    second.train(1)
    checkpoint = TrainingCheckpoint.from_bytes(data)
    done = restore(checkpoint, second.model, second.optimizer, second.source)
    assert (done.global_step, done.optimizer_step) == (kept, kept)
    assert metrics + second.train(STEPS - kept) == expected
    assert bytes_of(second) == ending
    assert second.source.next_batch().inputs.tolist() == next_inputs
    assert random.random() == next_random


@pytest.mark.parametrize("method", ["full", "qlora"])
def test_moments_go_from_pages_to_one_piece_and_back(method: str) -> None:
    whole = new_run(method, "adam")
    whole.train(6)
    run = new_run(method, "adam")
    run.train(2)
    for storage in ("paged adam", "adam"):
        checkpoint = capture(run.model, run.optimizer, source=run.source)
        run = new_run(method, storage, seed=4)
        restore(checkpoint, run.model, run.optimizer, run.source)
        run.train(2)
    ours, theirs = run.optimizer.state(), whole.optimizer.state()
    for part in ("values", "first_moments", "second_moments"):
        assert getattr(ours, part).tobytes() == getattr(theirs, part).tobytes()


def test_a_paged_optimizer_saved_and_loaded_takes_three_steps_equal_to_the_last_bit(tmp_path: Path) -> None:
    run = new_run("qlora", "paged adam")
    run.train(3)
    path = capture(run.model, run.optimizer, source=run.source).save(tmp_path / "run.riftckpt")
    again = new_run("qlora", "paged adam", seed=9)
    restore(TrainingCheckpoint.load(path), again.model, again.optimizer, again.source)
    for _ in range(3):
        assert again.train(1) == run.train(1)
        assert bytes_of(again) == bytes_of(run)


@pytest.mark.parametrize("method", METHODS)
def test_a_capture_changes_nothing_and_is_a_copy(method: str) -> None:
    run = new_run(method, "muon")
    run.train(2)
    before = bytes_of(run)
    checkpoint = capture(run.model, run.optimizer, source=run.source, metadata={"a": 1})
    assert bytes_of(run) == before
    written = checkpoint.to_bytes()
    run.train(1)
    assert checkpoint.to_bytes() == written
    assert (checkpoint.global_step, checkpoint.metadata, checkpoint.format_version) == (2, {"a": 1}, 3)
    assert capture(run.model, run.optimizer, global_step=70).global_step == 70
    assert capture(run.model, run.optimizer).batch_source is None


def test_sources_draw_from_no_generator_but_their_own() -> None:
    run = new_run()
    state = random.getstate()
    run.train(2)
    capture(run.model, run.optimizer, source=run.source)
    assert random.getstate() == state


def test_a_capture_needs_a_source_that_tells_where_it_stands() -> None:
    run = new_run()

    class Mute:
        def next_batch(self) -> None: ...

    class Liar(Mute):
        def checkpoint_state(self) -> dict[str, int]:
            return {"batches_emitted": 1}

        def restore_checkpoint_state(self, state: object) -> None: ...

    with pytest.raises(TypeError, match="needs a method checkpoint_state"):
        capture(run.model, run.optimizer, source=Mute())
    with pytest.raises(TypeError, match="must return a BatchSourceState"):
        capture(run.model, run.optimizer, source=Liar())


def test_a_capture_needs_the_optimizer_of_all_that_is_trained() -> None:
    run, other = new_run(), new_run()
    with pytest.raises(ValueError, match="another model"):
        capture(run.model, other.optimizer)
    parameters = dict(run.model.base_parameters())
    first = next(iter(parameters))
    reordered = {name: parameters[name] for name in reversed(parameters)}
    for part in ({first: parameters[first]}, reordered):
        with pytest.raises(ValueError, match="all 38 base parameters in their order"):
            capture(run.model, Adam(part))
    adapted = new_run("lora")
    base = adapted.model.base_parameters()
    with pytest.raises(ValueError, match="all 10 adapter parameters"):
        capture(adapted.model, Adam(base))
    with pytest.raises(TypeError, match="optimizer must be"):
        capture(run.model, object())
    with pytest.raises(TypeError, match="model must be"):
        capture(torch.nn.Linear(1, 1), run.optimizer)


def test_a_capture_waits_for_graphs_and_gradients_to_be_gone() -> None:
    run = new_run()
    logits = run.model([1, 2, 3])
    with pytest.raises(ValueError, match="cannot capture the optimizer's state while a graph"):
        capture(run.model, run.optimizer)
    logits.sum().backward()
    del logits
    with pytest.raises(ValueError, match=r"while gradients, that of token_embedding\.weight for one, wait"):
        capture(run.model, run.optimizer)
    run.optimizer.zero_gradients()
    capture(run.model, run.optimizer)


def test_values_that_change_while_they_are_read_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    state = run.optimizer.state

    def meanwhile() -> object:
        taken = state()
        with torch.no_grad():
            next(iter(run.optimizer.parameters.values()))[0, 0] += 1
        return taken

    monkeypatch.setattr(run.optimizer, "state", meanwhile)
    with pytest.raises(RuntimeError, match="changed while it was captured"):
        capture(run.model, run.optimizer)


def test_the_policies_of_the_run_are_captured_and_have_to_be_the_same() -> None:
    run, other = new_run(), new_run()
    run.model.attention, run.model.activation_checkpointing = "flash", "block"
    checkpoint = capture(run.model, run.optimizer)
    assert (checkpoint.full_sequence_attention, checkpoint.activation_checkpointing) == ("flash", "block")
    with pytest.raises(ValueError, match="attention is flash and the run's materialized"):
        restore(checkpoint, other.model, other.optimizer)
    restore(checkpoint, run.model, run.optimizer)
