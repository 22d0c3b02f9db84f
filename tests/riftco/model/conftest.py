"""A small model that the tests of this folder share."""

import pytest

from artifacts import ModelConfig
from riftco.model import DecoderOnlyTransformer


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig(
        vocabulary_size=11,
        maximum_context=7,
        model_width=12,
        head_count=3,
        block_count=2,
        feed_forward_width=10,
        random_seed=4,
    )


@pytest.fixture
def model(config: ModelConfig) -> DecoderOnlyTransformer:
    return DecoderOnlyTransformer(config)
