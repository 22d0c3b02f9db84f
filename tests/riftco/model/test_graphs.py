"""Graphs of a live model: how long one counts, and when it can no longer be differentiated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from riftco.model import Adam, DecoderOnlyTransformer, LoraConfig, next_token_loss
from riftco.serving import DecodeSession

IDS = torch.tensor([[3, 1, 4, 1, 5]])
Model = DecoderOnlyTransformer


@pytest.mark.parametrize("checkpointing", ["disabled", "block"])
@pytest.mark.parametrize("kind", ["dense", "adapted", "packed"])
def test_a_graph_counts_until_nothing_can_be_differentiated(
    model: Model, kind: str, checkpointing: str
) -> None:
    if kind == "packed":
        model.quantize_nf4()
    if kind != "dense":
        model.attach_lora(LoraConfig(rank=2))
    model.activation_checkpointing = checkpointing
    assert live_graphs(model) == 0
    part = model(IDS)[0, 2:].exp().sum()  # neither logits nor hidden are referred to by name
    assert live_graphs(model) > 0
    part.backward()
    assert live_graphs(model) > 0
    del part
    assert live_graphs(model) == 0


def test_a_graph_that_ends_in_the_hidden_rows_counts(model: Model) -> None:
    rows = model.hidden(IDS)
    assert live_graphs(model) == 1
    del rows
    assert live_graphs(model) == 0


@pytest.mark.parametrize("run", [lambda model: model(IDS), lambda model: next_token_loss(model, IDS, IDS)])
def test_an_adapter_on_the_head_alone_makes_graphs(model: Model, run: Callable[[Model], Any]) -> None:
    model.attach_lora(LoraConfig(rank=2, targets=("language_model_head",)))
    output = run(model)
    assert output.requires_grad
    assert live_graphs(model) == 1
    del output
    assert live_graphs(model) == 0


def test_what_cannot_be_differentiated_is_no_graph(model: Model) -> None:
    with torch.no_grad():
        kept = [model(IDS), next_token_loss(model, IDS, IDS)]
    with DecodeSession(model) as session:
        kept.append(session.step(3))
    model.requires_grad_(False)
    kept.append(model(IDS))
    assert live_graphs(model) == 0
    model.quantize_nf4()


def live_graphs(model: Model) -> int:
    return len(model.activity.holders("graph"))


def test_a_second_backward_is_refused(model: Model) -> None:
    loss = next_token_loss(model, IDS, IDS)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    logits = model(IDS)
    logits.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        logits.exp().sum().backward()


def test_another_precision_makes_a_replayed_graph_stale(model: Model) -> None:
    model.activation_checkpointing, model.precision = "block", "int8"
    loss = next_token_loss(model, IDS, IDS)
    model.precision = "fp32"
    with pytest.raises(RuntimeError, match="parameters or precision changed"):
        loss.backward()


@pytest.mark.parametrize("checkpointing", ["disabled", "block"])
@pytest.mark.parametrize("targets", [None, ("attention.query",), ("language_model_head",)])
def test_a_step_makes_graphs_stale(model: Model, targets: tuple[str, ...] | None, checkpointing: str) -> None:
    model.activation_checkpointing = checkpointing
    if targets is not None:
        model.attach_lora(LoraConfig(rank=2, targets=targets))
    adam = Adam(model.base_parameters() if targets is None else model.adapter_parameters())
    stale, loss = next_token_loss(model, IDS, IDS), next_token_loss(model, IDS, IDS)
    loss.backward()
    adam.step()
    with pytest.raises(RuntimeError, match=r"inplace operation|parameters or precision changed"):
        stale.backward()
