"""Which products of a training step a precision reaches: all that are large."""

import pytest
import torch

from artifacts import ModelConfig
from kernels import flash_attention
from kernels.linear import cpu
from kernels.linear.reference import has_matrix_units
from riftco.config import LORA_TARGETS, LoraConfig
from riftco.model import DecoderOnlyTransformer, next_token_loss, transformer

pytestmark = pytest.mark.skipif(
    not cpu.built or has_matrix_units(torch.device("cpu")), reason="products are left to torch here"
)

CONFIG = ModelConfig(
    vocabulary_size=97,
    maximum_context=16,
    model_width=32,
    head_count=2,
    block_count=2,
    feed_forward_width=64,
)
BLOCK_PRODUCTS, HEAD_PRODUCTS = 6, 1


def products_of_a_step(monkeypatch: pytest.MonkeyPatch, model: DecoderOnlyTransformer) -> list[int]:
    """The kind of operands of each product by the compiled code: 0 floats, 1 of 16 bits, 2 of 8."""
    kinds: list[int] = []
    call = cpu._product
    assert call is not None
    monkeypatch.setattr(cpu, "_product", lambda *given: (kinds.append(given[3]), call(*given))[1])
    ids = torch.arange(64).view(4, 16)
    next_token_loss(model, ids, ids + 1).backward()
    return kinds


@pytest.mark.parametrize(("precision", "kind"), [("fp32", 0), ("bf16", 1), ("int8", 2)])
def test_every_product_of_full_training_has_it(
    monkeypatch: pytest.MonkeyPatch, precision: str, kind: int
) -> None:
    model = DecoderOnlyTransformer(CONFIG)
    model.precision = precision
    layers = CONFIG.block_count * BLOCK_PRODUCTS + HEAD_PRODUCTS
    assert products_of_a_step(monkeypatch, model) == [kind] * 3 * layers


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("targets", [LORA_TARGETS, ("attention.query", "feed_forward.project")])
def test_every_product_with_a_frozen_weight_has_it(
    monkeypatch: pytest.MonkeyPatch, packed: bool, targets: tuple[str, ...]
) -> None:
    model = DecoderOnlyTransformer(CONFIG)
    model.precision = "int8"
    if packed:
        model.quantize_nf4()
    model.attach_lora(LoraConfig(rank=2, targets=targets))
    kinds = products_of_a_step(monkeypatch, model)
    assert set(kinds) == {2}
    assert len(kinds) > CONFIG.block_count * BLOCK_PRODUCTS


@pytest.mark.parametrize(("precision", "operands"), [("fp32", "full"), ("bf16", "half"), ("int8", "half")])
def test_attention_has_it_too(monkeypatch: pytest.MonkeyPatch, precision: str, operands: str) -> None:
    found: list[str] = []

    def attention(*given: torch.Tensor, operands: str, **more: object) -> torch.Tensor:
        found.append(operands)
        return flash_attention(*given, operands=operands, **more)

    monkeypatch.setattr(transformer, "flash_attention", attention)
    model = DecoderOnlyTransformer(CONFIG)
    model.precision, model.attention = precision, "flash"
    model(torch.arange(16).view(1, 16))
    assert found == [operands] * CONFIG.block_count
