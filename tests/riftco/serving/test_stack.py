"""ServingStack: a snapshot served without files, one pool for all its requests."""

import pytest

from riftco import ModelSnapshot
from riftco.config import ServingConfig
from riftco.serving import ServingStack, TemperatureSampler
from tests.riftco.serving.models import runtime
from tests.support import fixture


def snapshot(name: str = "byte") -> ModelSnapshot:
    live = runtime(name)
    return ModelSnapshot.capture(live.model, live.tokenizer)


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_a_snapshot_generates_what_its_bundle_does(kind: str) -> None:
    stack = ServingStack(snapshot(), ServingConfig(backend="cpu", kv_cache=kind, kv_cache_block_size=5))  # type: ignore[arg-type]
    reference = fixture("byte.reference.json")
    for case in reference["greedy"]:
        result = stack.generate(case["prompt"], max_new_tokens=case["max_new_tokens"])
        assert list(result.generated_token_ids) == case["generated_token_ids"]
    case = reference["sampled"][0]
    sampler = TemperatureSampler(case["temperature"], top_k=case["top_k"], seed=case["seed"])
    sampled = stack.generate(case["prompt"], max_new_tokens=case["max_new_tokens"], sampler=sampler)
    assert list(sampled.generated_token_ids) == case["generated_token_ids"]


def test_requests_share_the_pool_and_leave_nothing_behind() -> None:
    stack = ServingStack(
        snapshot(), ServingConfig(backend="cpu", kv_cache_block_size=5), kv_cache_block_count=4
    )
    assert stack.pool is not None
    held = stack.pool.lease(2)
    with pytest.raises(RuntimeError, match="pool is exhausted"):
        stack.generate("the ", max_new_tokens=20)
    assert stack.pool.leased_block_count == 2
    stack.pool.release(held)
    assert stack.generate("the ", max_new_tokens=20).generated_token_ids
    assert stack.pool.leased_block_count == 0


def test_more_tokens_than_the_limit_are_refused() -> None:
    stack = ServingStack(snapshot(), ServingConfig(backend="cpu", maximum_new_tokens=3))
    with pytest.raises(ValueError, match="exceeds the serving limit 3"):
        stack.generate("the ", max_new_tokens=4)
    assert len(stack.generate("the ", max_new_tokens=3).generated_token_ids) == 3


def test_a_tokenizer_of_another_model_is_refused() -> None:
    mixed = ModelSnapshot(snapshot().config, snapshot("bpe").tokenizer, snapshot().tensors)
    with pytest.raises(ValueError, match="trained together"):
        ServingStack(mixed)
