"""Samples change nothing of a run, and their file holds each of them once."""

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifacts import ModelConfig
from riftco.model import DecoderOnlyTransformer
from riftco.tokenizer import Tokenizer
from riftco.training.tracking.samples import SampleFile, text_sampler

TEXT = "Zoë was in the barn. "


def model_of(tokenizer: Tokenizer) -> DecoderOnlyTransformer:
    return DecoderOnlyTransformer(ModelConfig(tokenizer.vocab_size, 8, 8, 2, 1, 8, random_seed=1))


def test_a_sample_is_a_function_of_the_step_and_goes_past_the_context() -> None:
    tokenizer = Tokenizer(TEXT, method="byte")
    sampler = text_sampler(model_of(tokenizer), tokenizer, "in the barn")
    assert sampler(3) == sampler(3)
    assert sampler(3) != sampler(4)
    assert set(sampler(3)) <= {*TEXT, "�"}
    assert len(sampler(3).encode(errors="replace")) >= 64


def test_a_sample_changes_no_weight_gradient_mode_or_generator() -> None:
    tokenizer = Tokenizer(TEXT, method="byte")
    model = model_of(tokenizer)
    model(tokenizer.encode("barn")).sum().backward()
    before = [(p.clone(), p.grad.clone(), p._version) for p in model.parameters() if p.grad is not None]
    numbers, state = random.getstate(), torch.get_rng_state()
    text_sampler(model, tokenizer, "Z")(1)
    assert random.getstate() == numbers
    assert torch.get_rng_state().equal(state)
    assert torch.is_grad_enabled()
    after = [p for p in model.parameters() if p.grad is not None]
    for (weight, gradient, version), parameter in zip(before, after, strict=True):
        assert parameter.equal(weight)
        assert parameter.grad is not None
        assert parameter.grad.equal(gradient)
        assert parameter._version == version


def test_the_sample_is_of_the_model_as_it_is_now() -> None:
    tokenizer = Tokenizer(TEXT, method="byte")
    model = model_of(tokenizer)
    sampler = text_sampler(model, tokenizer, "Z")
    with torch.no_grad():
        model.language_model_head.bias[tokenizer.encode("b")[0]] += 1000
    assert sampler(1) == "b" * 64


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


@given(text=st.text(), last_step=st.integers(0, 5))
def test_a_run_that_goes_on_keeps_the_samples_of_its_past_alone(
    tmp_path_factory: pytest.TempPathFactory, text: str, last_step: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "sub" / "samples.jsonl"
    file = SampleFile(path, "\n")
    file.begin(0)
    for step in range(1, 5):
        file.add(step, text.encode(errors="replace").decode())
    with path.open("ab") as torn:
        torn.write(b'{"step": 1, "prompt": "\xc3')
    SampleFile(path, "\n").begin(last_step)
    file.add(9, "after")
    steps = [step for step in range(1, 5) if step <= last_step]
    assert [line["step"] for line in lines(path)] == [*steps, 9]
    assert all(line["text"] == text.encode(errors="replace").decode() for line in lines(path)[:-1])
    assert all(line["prompt"] == "\n" for line in lines(path))
