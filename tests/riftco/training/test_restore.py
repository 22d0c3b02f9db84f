"""Restoring is checked before it changes anything, and is done whole or not at all."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from artifacts import BatchSourceState, TrainingCheckpoint
from riftco.config import LoraConfig
from riftco.model import Adam, DecoderOnlyTransformer
from riftco.model import optimizer as optimizer_module
from riftco.serving import DecodeSession
from riftco.training import ExampleWindowBatchSource, SequenceWindowBatchSource
from riftco.training.checkpoints import capture, restore, validate
from tests.riftco.training.runs import CONFIG, LORA, METHODS, SEQUENCES, Run, bytes_of, new_optimizer, new_run

SIZES = {"batch_size": 2, "context_size": 5, "random_seed": 1}


def trained(method: str = "full", optimizer: str = "adam") -> TrainingCheckpoint:
    run = new_run(method, optimizer)
    run.train(2)
    return capture(run.model, run.optimizer, source=run.source)


def other(method: str = "full", kind: str = "adam", **changes: Any) -> Run:
    """A run of the same kind in another state, with some parts exchanged."""
    run = new_run(method, kind, seed=8)
    run.train(1)
    return replace(run, **changes)


def of_model(model: DecoderOnlyTransformer, optimizer: str = "adam") -> Run:
    source = ExampleWindowBatchSource(SEQUENCES, **SIZES)
    return Run(model, new_optimizer(optimizer, model), source)


def adapted(**changes: Any) -> Run:
    model = DecoderOnlyTransformer(CONFIG)
    model.attach_lora(LORA.model_copy(update=changes))
    return of_model(model)


def flash() -> Run:
    run = other()
    run.model.attention = "flash"
    return run


def block() -> Run:
    run = other()
    run.model.activation_checkpointing = "block"
    return run


def adam(**settings: Any) -> Run:
    run = new_run()
    return replace(run, optimizer=Adam(run.model.base_parameters(), **({"learning_rate": 0.01} | settings)))


def sequence_windows() -> Run:
    return other(source=SequenceWindowBatchSource(SEQUENCES, **SIZES))


def other_data() -> Run:
    return other(source=ExampleWindowBatchSource(SEQUENCES[1:], **SIZES))


def of_embeddings() -> Run:
    run = new_run()
    parameters = dict(run.model.base_parameters())
    name = next(iter(parameters))
    return replace(run, optimizer=Adam({name: parameters[name]}, 0.01))


MISMATCHES: dict[str, tuple[str, Callable[[], Run], str]] = {
    "another model's optimizer": ("full", lambda: other(optimizer=new_run().optimizer), "another model"),
    "epsilon": (
        "full",
        lambda: of_model(DecoderOnlyTransformer(replace(CONFIG, layer_norm_epsilon=1e-4))),
        "model config",
    ),
    "width": (
        "full",
        lambda: of_model(DecoderOnlyTransformer(replace(CONFIG, model_width=4))),
        "model config",
    ),
    "attention": ("full", flash, "attention"),
    "activation checkpointing": ("full", block, "activation checkpointing"),
    "packed into dense": ("qlora", lambda: other("lora"), "packed weights"),
    "dense into packed": ("lora", lambda: other("qlora"), "packed weights"),
    "adapters into none": ("lora", other, "LoRA"),
    "none into adapters": ("full", lambda: other("lora"), "LoRA"),
    "rank": ("lora", lambda: adapted(rank=1), "LoRA"),
    "alpha": ("lora", lambda: adapted(alpha=4.0), "LoRA"),
    "targets": ("lora", lambda: adapted(targets=LORA.targets[:1]), "LoRA"),
    "some parameters only": ("full", of_embeddings, r"not those that Adam owns: position_embedding\.weight"),
    "another optimizer": ("full", lambda: other("full", "adamw"), "is of adam, this is adamw"),
    "learning rate": ("full", lambda: adam(learning_rate=0.02), "learning_rate"),
    "beta1": ("full", lambda: adam(beta1=0.8), "beta1"),
    "beta2": ("full", lambda: adam(beta2=0.99), "beta2"),
    "optimizer's epsilon": ("full", lambda: adam(epsilon=1e-7), "epsilon"),
    "norm": ("full", lambda: adam(maximum_gradient_norm=2.0), "maximum_gradient_norm"),
    "no source": ("full", lambda: other(source=None), "give that source"),
    "source type": ("full", sequence_windows, r"source_type is example_window and .* sequence_window"),
    "data": ("full", other_data, "fingerprint"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_run_that_differs_is_refused_by_what_differs_and_left_alone(name: str) -> None:
    method, build, message = MISMATCHES[name]
    run = build()
    before = None if run.source is None else bytes_of(run)
    for refuse in (validate, restore):
        with pytest.raises(ValueError, match=message):
            refuse(trained(method), run.model, run.optimizer, run.source)
    assert before is None or bytes_of(run) == before


@pytest.mark.parametrize("argument", range(4))
def test_arguments_of_other_types_are_refused(argument: int) -> None:
    run = other()
    arguments: list[Any] = [trained(), run.model, run.optimizer, run.source]
    arguments[argument] = object()
    with pytest.raises(TypeError, match=r"must be|needs a method"):
        validate(*arguments)


@pytest.mark.parametrize("method", METHODS)
def test_validating_changes_nothing(method: str) -> None:
    run = other(method, "muon")
    before = bytes_of(run)
    validate(trained(method, "muon"), run.model, run.optimizer, run.source)
    assert bytes_of(run) == before


def test_a_source_that_the_checkpoint_does_not_have_is_left_alone() -> None:
    run = new_run()
    run.train(2)
    checkpoint = capture(run.model, run.optimizer)
    target = other()
    before = target.source.checkpoint_state()
    assert restore(checkpoint, target.model, target.optimizer, target.source).optimizer_step == 2
    assert target.source.checkpoint_state() == before


def parts_of(run: Run) -> list[tuple[object, str]]:
    """What restoring calls, in its order."""
    model = [(run.model, "load_base_values")] if run.model.lora else []
    model += [(run.model, "load_packed_state")] if run.model.quantized else []
    return [
        (run.source, "restore_checkpoint_state"),
        *model,
        (run.optimizer, "load_state"),
        (random, "setstate"),
    ]


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize(
    ("method", "index"), [(m, i) for m, count in zip(METHODS, (3, 4, 5), strict=True) for i in range(count)]
)
def test_whatever_part_fails_everything_is_as_it_was(
    method: str, index: int, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, run = trained(method, optimizer), other(method, optimizer)
    calls: list[str] = []
    for place, (holder, name) in enumerate(parts_of(run)):
        monkeypatch.setattr(holder, name, _recorded(calls, holder, name, fails=place == index))
    before = bytes_of(run)
    with pytest.raises(OSError, match="as planned"):
        restore(checkpoint, run.model, run.optimizer, run.source)
    assert bytes_of(run) == before
    order = [name for _, name in parts_of(run)]
    assert calls == [*order[: index + 1], *reversed(order[:index])]
    monkeypatch.undo()
    restore(checkpoint, run.model, run.optimizer, run.source)
    assert capture(run.model, run.optimizer, source=run.source).first_moments.any()


def _recorded(calls: list[str], holder: object, name: str, *, fails: bool) -> Callable[[Any], None]:
    original = getattr(holder, name)

    def call(argument: Any) -> None:
        calls.append(name)
        if fails:
            raise OSError("as planned")
        original(argument)

    return call


@pytest.mark.parametrize("copied", range(4))
def test_an_interrupt_in_the_middle_of_a_part_is_undone_too(
    copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, run = trained(), other()
    before, copy, calls = bytes_of(run), optimizer_module._copy, []

    def interrupted(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == copied + 1:
            raise KeyboardInterrupt
        copy(*arguments)

    monkeypatch.setattr(optimizer_module, "_copy", interrupted)
    if copied < 3:
        with pytest.raises(KeyboardInterrupt):
            restore(checkpoint, run.model, run.optimizer, run.source)
        assert bytes_of(run) == before
    else:
        restore(checkpoint, run.model, run.optimizer, run.source)
        assert len(calls) == 3


def test_a_rollback_that_fails_says_that_the_live_state_may_be_indeterminate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Once(ExampleWindowBatchSource):
        restored = False

        def restore_checkpoint_state(self, state: BatchSourceState) -> None:
            if self.restored:
                raise OSError("gone")
            self.restored = True
            super().restore_checkpoint_state(state)

    checkpoint, run = trained(), other(source=Once(SEQUENCES, **SIZES))
    monkeypatch.setattr(random, "setstate", _recorded([], random, "setstate", fails=True))
    with pytest.raises(RuntimeError, match="live state may be indeterminate") as caught:
        restore(checkpoint, run.model, run.optimizer, run.source)
    assert str(caught.value.__cause__) == "gone"
    assert str(caught.value.__cause__.__context__) == "as planned"


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_restored_below_a_session_a_graph_or_gradients(method: str) -> None:
    checkpoint, run = trained(method), other(method)
    before = bytes_of(run)
    arguments = (checkpoint, run.model, run.optimizer, run.source)
    with (
        DecodeSession(run.model),
        pytest.raises(ValueError, match="cannot restore a checkpoint while a decode session"),
    ):
        restore(*arguments)
    loss = run.model([1, 2, 3]).sum()
    with pytest.raises(ValueError, match="cannot restore a checkpoint while a graph"):
        restore(*arguments)
    loss.backward()
    del loss
    with pytest.raises(ValueError, match="cannot restore a checkpoint while gradients"):
        restore(*arguments)
    run.optimizer.zero_gradients()
    assert bytes_of(run) == before
    restore(*arguments)


def test_frozen_base_values_need_the_optimizer_to_be_the_only_one() -> None:
    checkpoint, run = trained("lora"), other("lora")
    second = Adam(run.model.base_parameters())
    before = bytes_of(run)
    with pytest.raises(ValueError, match="while an optimizer is alive"):
        restore(checkpoint, run.model, run.optimizer, run.source)
    assert bytes_of(run) == before
    second.close()
    restore(checkpoint, run.model, run.optimizer, run.source)


def test_the_packed_state_may_have_other_blocks_and_scales_than_the_model_had() -> None:
    checkpoint = trained("qlora")
    model = DecoderOnlyTransformer(CONFIG)
    model.quantize_nf4(128, double_quantization=False)
    model.attach_lora(LoraConfig(**LORA.model_dump() | {"random_seed": 1}))
    run = of_model(model)
    restore(checkpoint, run.model, run.optimizer, run.source)
    assert checkpoint.packed_weights is not None
    restored, stored = model.packed_state(), checkpoint.packed_weights
    assert [weight.encode() for weight in restored] == [weight.encode() for weight in stored]
