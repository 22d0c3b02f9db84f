"""Live models and bundles that several serving tests share."""

from functools import cache

import torch

from artifacts import ModelBundle, ModelConfig
from riftco import ModelRuntime
from riftco.model import DecoderOnlyTransformer
from tests.support import FIXTURES

BUNDLES = ("byte", "bpe", "bpe-lora-child", "bpe-qlora-child")


@cache
def bundle(name: str) -> ModelBundle:
    """One of the fixture bundles."""
    return ModelBundle.load(FIXTURES / f"{name}.rift")


@cache
def runtime(name: str) -> ModelRuntime:
    """A live fixture model, shared by the tests that do not change it."""
    return ModelRuntime.open(bundle(name))


def tiny_config(context: int = 40, layers: int = 2) -> ModelConfig:
    """Dimensions of a model that runs in microseconds."""
    return ModelConfig(19, context, 8, 2, layers, 12, random_seed=3)


def tiny_model(context: int = 40) -> DecoderOnlyTransformer:
    """A model with random weights."""
    return DecoderOnlyTransformer(tiny_config(context))


def token_ids(count: int) -> list[int]:
    """Ids within the tiny vocabulary, not periodic in any page size."""
    return [(7 * i * i + 3 * i) % 19 for i in range(count)]


@torch.no_grad()
def last_logits(model: DecoderOnlyTransformer, ids: list[int]) -> torch.Tensor:
    """The oracle: the last row of a full forward."""
    return model(ids)[0, -1]
