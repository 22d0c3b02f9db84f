"""Any valid bundle, for round trips."""

import numpy as np
from hypothesis import strategies as st

from artifacts import ModelBundle, ModelConfig, TokenizerSpec
from tests.artifacts.json_values import texts, values

float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
tokenizers = st.one_of(
    st.lists(st.integers(0, 255), min_size=1, max_size=5, unique=True).map(
        lambda vocabulary: TokenizerSpec("byte", tuple(vocabulary))
    ),
    st.lists(st.integers(0, 255), max_size=3, unique=True).map(
        lambda lefts: TokenizerSpec(
            "bpe", merge_rules=tuple((left, 7, 256 + i) for i, left in enumerate(lefts))
        )
    ),
)


@st.composite
def bundles(draw: st.DrawFn) -> ModelBundle:
    """Small models of all shapes, with awkward texts and metadata."""
    tokenizer, heads = draw(tokenizers), draw(st.integers(1, 2))
    config = ModelConfig(
        vocabulary_size=tokenizer.vocabulary_size,
        maximum_context=draw(st.integers(1, 3)),
        model_width=heads * draw(st.integers(1, 2)),
        head_count=heads,
        block_count=draw(st.integers(1, 2)),
        feed_forward_width=draw(st.integers(1, 3)),
        random_seed=draw(st.integers(0, 2**32 - 1)),
        layer_norm_epsilon=draw(st.sampled_from([1e-5, 1e-3, 0.1, 1.0, 1e-30])),
    )
    specs = config.parameter_specs()
    some = np.array(draw(st.lists(float32, min_size=1, max_size=8)), np.float32)
    return ModelBundle(
        config,
        tokenizer,
        specs,
        np.resize(some, sum(spec.count for spec in specs)),
        stage=draw(texts.filter(str.strip)),
        parent_artifact_id=draw(st.none() | st.just("0123456789abcdef" * 4)),
        metadata=draw(st.dictionaries(texts, values, max_size=3)),
    )
