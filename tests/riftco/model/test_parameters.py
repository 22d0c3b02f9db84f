"""A parameter list: a mapping that can be closed, and that its model knows of."""

import copy
import pickle

import pytest
import torch

from riftco.model import DecoderOnlyTransformer, LoraConfig


def test_it_maps_names_to_the_models_own_parameters(model: DecoderOnlyTransformer) -> None:
    with model.base_parameters() as parameters:
        assert parameters.model is model
        assert parameters.activity is model.activity
        assert list(parameters) == [spec.name for spec in model.config.parameter_specs()]
        assert len(parameters) == len(list(model.parameters()))
        assert parameters["final_norm.scale"] is model.final_norm.scale
        assert "blocks.2.attention.query.weight" not in parameters


def test_adapters_are_listed_apart(model: DecoderOnlyTransformer) -> None:
    names = list(model.base_parameters())
    model.attach_lora(LoraConfig(rank=2, targets=("feed_forward.expand",)))
    assert list(model.base_parameters()) == names
    assert list(model.adapter_parameters()) == [
        f"blocks.{block}.feed_forward.expand.lora_{side}.weight" for block in (0, 1) for side in "ab"
    ]


@pytest.mark.parametrize(
    "use",
    [
        len,
        list,
        dict,
        lambda p: p["final_norm.scale"],
        lambda p: p.model,
        lambda p: p.activity,
        lambda p: p.__enter__(),
    ],
)
def test_a_closed_list_refuses_every_use(model: DecoderOnlyTransformer, use) -> None:
    parameters = model.base_parameters()
    assert not parameters.closed
    parameters.close()
    parameters.close()
    assert parameters.closed
    with pytest.raises(RuntimeError, match="the parameter list is closed"):
        use(parameters)


def test_it_counts_from_its_making_to_its_closing(model: DecoderOnlyTransformer) -> None:
    with model.base_parameters() as parameters:
        assert model.activity.holders("base list") == [parameters]
        assert model.activity.holders("adapter list") == []
    assert model.activity.holders("base list") == []


def test_a_list_in_passing_counts_for_nothing(model: DecoderOnlyTransformer) -> None:
    for parameter in model.base_parameters().values():
        assert parameter.dtype == torch.float32
    assert model.activity.holders("base list") == []


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(model: DecoderOnlyTransformer, duplicate) -> None:
    with pytest.raises(TypeError, match="cannot be copied"):
        duplicate(model.base_parameters())


def test_without_adapters_there_is_no_list_of_them(model: DecoderOnlyTransformer) -> None:
    with pytest.raises(ValueError, match="no LoRA adapter"):
        model.adapter_parameters()
    model.attach_lora(LoraConfig(rank=2))
    model.merge_lora()
    with pytest.raises(ValueError, match="no LoRA adapter"):
        model.adapter_parameters()


def test_values_that_do_not_fit_are_refused_before_any_change(model: DecoderOnlyTransformer) -> None:
    before = {name: p.detach().clone() for name, p in model.base_parameters().items()}
    good = {name: torch.zeros_like(value) for name, value in before.items()}
    name = list(good)[-1]
    for wrong, message in (
        ({k: v for k, v in good.items() if k != name}, "names do not match"),
        ({name: good[name], **good}, "names do not match"),
        (good | {name: torch.zeros(3)}, f"shapes do not match model: {name}"),
        (good | {name: torch.full_like(good[name], torch.nan)}, f"{name} has values that are not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            model.load_base_values(wrong)
    assert all(torch.equal(p, before[name]) for name, p in model.base_parameters().items())
    model.load_base_values(good)
    assert not any(bool(p.any()) for p in model.base_parameters().values())
