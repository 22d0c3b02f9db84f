"""Packed models: the original's bytes and statistics, what is trained on them, and what a merge makes."""

import base64
from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from artifacts import ModelConfig, PackedNf4Weight
from artifacts.packed_nf4 import decode_packed, encode_packed
from kernels import dequantize_nf4
from riftco.config import LORA_TARGETS
from riftco.model import Adam, DecoderOnlyTransformer, LoraConfig, next_token_loss
from riftco.model.nf4 import QuantizedMemory
from tests.support import fixture, float32_tensor

RECORDED = fixture("nf4.json")
SHAPES = RECORDED["shapes"]
IDS = torch.tensor([[3, 1, 4, 1, 5]])
CASES = pytest.mark.parametrize(
    "case", RECORDED["cases"], ids=lambda c: f"{c['block_size']}-{c['double_quantization']}"
)


def recorded_model() -> DecoderOnlyTransformer:
    """One block with the recorded weights."""
    vocabulary, width = SHAPES["language_model_head.weight"]
    inner, _ = SHAPES["blocks.0.feed_forward.expand.weight"]
    model = DecoderOnlyTransformer(ModelConfig(vocabulary, 5, width, 1, 1, inner))
    values = {name: parameter.detach() for name, parameter in model.base_parameters().items()}
    inputs = {name: float32_tensor(text).view(SHAPES[name]) for name, text in RECORDED["inputs"].items()}
    model.load_base_values(values | inputs)
    return model


def quantized(model: DecoderOnlyTransformer, case: dict) -> DecoderOnlyTransformer:
    sizes = {"double_quantization": case["double_quantization"], "scale_block_size": case["scale_block_size"]}
    model.quantize_nf4(case["block_size"], **sizes)
    return model


@CASES
def test_the_packed_state_and_its_memory_are_the_originals(case: dict) -> None:
    model = quantized(recorded_model(), case)
    assert encode_packed(model.packed_state()) == base64.b64decode(case["packed_state_base64"])
    memory = model.quantized_memory()
    assert asdict(memory) == case["memory"]
    assert memory.compression_ratio == case["compression_ratio"]


@CASES
def test_the_dequantized_weights_are_the_originals(case: dict) -> None:
    model = quantized(recorded_model(), case)
    model.attach_lora(LoraConfig(rank=1, targets=("attention.query",)))
    model.merge_lora()
    for name, text in case["dequantized"].items():
        weight = model.base_parameters()[name].detach()
        assert torch.equal(weight.flatten(), float32_tensor(text)), name


@CASES
def test_a_recorded_state_takes_the_place_of_any_other(case: dict) -> None:
    data = base64.b64decode(case["packed_state_base64"])
    model = recorded_model()
    model.quantize_nf4(128, double_quantization=not case["double_quantization"])
    model.load_packed_state(decode_packed(data))
    assert encode_packed(model.packed_state()) == data
    assert asdict(model.quantized_memory()) == case["memory"]
    with torch.no_grad():
        assert torch.equal(model(IDS), quantized(recorded_model(), case)(IDS))


def test_a_dense_model_takes_no_packed_state(model: DecoderOnlyTransformer) -> None:
    twin = DecoderOnlyTransformer(model.config)
    twin.quantize_nf4()
    for state in (twin.packed_state(), model.packed_state()):
        with pytest.raises(ValueError, match=r"the model has \[\]; quantize a model"):
            model.load_packed_state(state)
    assert not model.quantized


def test_a_state_that_does_not_fit_changes_nothing(model: DecoderOnlyTransformer) -> None:
    model.quantize_nf4()
    state = model.packed_state()
    before = encode_packed(state)
    for wrong in (state[:-1], (*state, state[0]), (*state[:-1], transposed(state[-1]))):
        with pytest.raises(ValueError, match="the packed state has weights"):
            model.load_packed_state(wrong)
    assert encode_packed(model.packed_state()) == before


def transposed(weight: PackedNf4Weight) -> PackedNf4Weight:
    return PackedNf4Weight(weight.shape[::-1], weight.block_size, weight.codes, weight.scales)


def test_a_packed_linear_has_no_float_weight_and_nothing_of_the_base_is_trained(
    model: DecoderOnlyTransformer,
) -> None:
    dense = [name for name in model.base_parameters() if not is_packed(name)]
    model.quantize_nf4()
    assert model.quantized
    assert list(model.base_parameters()) == dense
    for _, linear in model.projections():
        assert linear.weight is None
        assert linear.packed.shape == (linear.fan_out, linear.fan_in)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.attach_lora(LoraConfig(rank=2, targets=LORA_TARGETS))
    next_token_loss(model, IDS, IDS).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(
        model.adapter_parameters()
    )


def is_packed(name: str) -> bool:
    return name.endswith(".weight") and not name.endswith("embedding.weight")


def test_outputs_and_gradients_are_those_of_the_dequantized_weights(model: DecoderOnlyTransformer) -> None:
    model.quantize_nf4(32)
    twin = DecoderOnlyTransformer(model.config)
    values = {name: parameter.detach() for name, parameter in twin.base_parameters().items()}
    twin.load_base_values(
        values | {f"{name}.weight": dequantize_nf4(linear.packed) for name, linear in model.projections()}
    )
    outcomes = []
    for subject in (model, twin):
        subject.attach_lora(LoraConfig(rank=2, targets=LORA_TARGETS))
        with torch.no_grad():
            for i, parameter in enumerate(subject.adapter_parameters().values()):
                parameter.copy_(torch.sin(torch.arange(parameter.numel()) + float(i)).view_as(parameter))
        loss = next_token_loss(subject, IDS, IDS.roll(-1))
        loss.backward()
        outcomes.append([subject(IDS), loss, *(p.grad for p in subject.adapter_parameters().values())])
    for ours, exact in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-4)


def test_a_merge_dequantizes_every_weight_with_an_adapter_or_without(model: DecoderOnlyTransformer) -> None:
    names = [spec.name for spec in model.config.parameter_specs()]
    model.quantize_nf4(32)
    bases = {name: dequantize_nf4(linear.packed) for name, linear in model.projections()}
    model.attach_lora(LoraConfig(rank=2, alpha=3.0, targets=("feed_forward.expand", "language_model_head")))
    with torch.no_grad():
        adapters = {name: p.fill_(0.25).clone() for name, p in model.adapter_parameters().items()}
        adapted = model(IDS)
        model.merge_lora()
        torch.testing.assert_close(model(IDS), adapted, atol=1e-5, rtol=0)
    assert not model.quantized
    assert model.quantized_memory() == QuantizedMemory()
    assert model.packed_state() == ()
    merged = model.base_parameters()
    assert list(merged) == names
    for name, base in bases.items():
        weight = merged[f"{name}.weight"]
        if f"{name}.lora_a.weight" in adapters:
            base = base + 1.5 * (adapters[f"{name}.lora_b.weight"] @ adapters[f"{name}.lora_a.weight"])
        assert torch.equal(weight.detach(), base)
        assert weight.requires_grad
    Adam(merged)  # the model is whole again


def test_a_merge_that_would_overflow_leaves_every_weight_packed(model: DecoderOnlyTransformer) -> None:
    model.quantize_nf4()
    before = encode_packed(model.packed_state())
    model.attach_lora(LoraConfig(rank=2, targets=("language_model_head",)))
    with torch.no_grad():
        model.adapter_parameters()["language_model_head.lora_b.weight"].fill_(3e38)
    with pytest.raises(ValueError, match=r"language_model_head\.weight not finite; nothing was changed"):
        model.merge_lora()
    assert encode_packed(model.packed_state()) == before
    assert model.quantized
    assert model.lora is not None


def test_a_model_is_quantized_once_and_before_lora(model: DecoderOnlyTransformer) -> None:
    model.quantize_nf4()
    with pytest.raises(ValueError, match="quantized once, before LoRA"):
        model.quantize_nf4()
    for merged in (False, True):
        adapted = DecoderOnlyTransformer(model.config)
        adapted.attach_lora(LoraConfig(rank=2))
        if merged:
            adapted.merge_lora()
        with pytest.raises(ValueError, match="quantized once, before LoRA"):
            adapted.quantize_nf4()


def test_what_cannot_be_quantized_is_refused_before_any_change(model: DecoderOnlyTransformer) -> None:
    for sizes in ({"block_size": 48}, {"scale_block_size": 1}):
        with pytest.raises(ValueError, match="is not supported"):
            model.quantize_nf4(**sizes)
    with torch.no_grad():
        model.language_model_head.weight[3, 2] = torch.inf
    with pytest.raises(ValueError, match=r"cannot quantize language_model_head\.weight: .* not finite"):
        model.quantize_nf4()
    assert not model.quantized
    assert all(linear.packed is None and linear.weight is not None for _, linear in model.projections())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_dense_model_has_no_packed_bytes(model: DecoderOnlyTransformer) -> None:
    assert asdict(model.quantized_memory()) == dict.fromkeys(asdict(QuantizedMemory()), 0)
    assert model.quantized_memory().compression_ratio == 0.0


def test_packed_weights_move_with_the_model(model: DecoderOnlyTransformer) -> None:
    model.quantize_nf4()
    codes = model.language_model_head.packed.codes.clone()
    double = model.double()
    assert double(IDS).dtype == torch.float64
    assert torch.equal(double.language_model_head.packed.codes, codes)
    moved = DecoderOnlyTransformer(model.config)
    moved.quantize_nf4()
    moved.to("meta")
    assert {moved.language_model_head.packed.codes.device.type, moved.device.type} == {"meta"}


def test_models_of_different_packing_and_dtype_live_side_by_side(model: DecoderOnlyTransformer) -> None:
    def alone(kind: int) -> torch.Tensor:
        subject = DecoderOnlyTransformer(model.config)
        if kind:
            subject.quantize_nf4(32 * kind, double_quantization=kind == 1)
        return subject

    with torch.no_grad():
        expected = [alone(kind)(IDS) for kind in range(3)] + [alone(1).double()(IDS)]
        together = [alone(0), alone(1), alone(2), alone(1).double()]
        for _ in range(2):
            for subject, logits in zip(together, expected, strict=True):
                assert torch.equal(subject(IDS), logits)


WIDE = ModelConfig(11, 24, 192, 2, 1, 8192)
TOO_LARGE = 192 * 8192  # elements of the weights that may never be whole


@pytest.mark.parametrize("checkpointing", ["disabled", "block"])
def test_no_step_holds_or_makes_a_float_copy_of_a_packed_weight(checkpointing: str) -> None:
    model = DecoderOnlyTransformer(WIDE)
    model.quantize_nf4()
    model.attach_lora(LoraConfig(rank=2, targets=LORA_TARGETS))
    model.activation_checkpointing = checkpointing
    adam = Adam(model.adapter_parameters())
    ids, saved = torch.arange(24)[None] % 11, []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with saved_tensors_hooks(save, lambda tensor: tensor):
            loss = next_token_loss(model, ids, ids)
            loss.backward()
        adam.step()
    assert max(tensor.numel() for tensor in saved) < TOO_LARGE
    sizes = [size for size in allocations(profiler) if size >= 4 * 24 * 8192]
    assert sizes, "the profiler must have seen the activations"
    assert max(sizes) < 4 * TOO_LARGE


def allocations(profiler: profile) -> Iterator[int]:
    """Bytes of every block of memory that torch took."""
    return (e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]")
