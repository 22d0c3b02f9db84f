"""Generation: the recorded tokens, and rollover equal to a full forward over the cropped window."""

import base64

import pytest
import torch

from artifacts import ModelConfig, TokenizerSpec
from riftco.model import DecoderOnlyTransformer
from riftco.serving import GreedySampler, PagedKvCachePool, TemperatureSampler, TextGenerator
from riftco.tokenizer import Tokenizer
from tests.riftco.serving.models import BUNDLES, last_logits, runtime
from tests.support import fixture

CACHES = [(name, *cache) for name in BUNDLES for cache in (("paged", 5), ("contiguous", 16))]
CACHES += [("byte", "paged", block_size) for block_size in (1, 12, 1000)]


@pytest.mark.parametrize(("name", "kind", "block_size"), CACHES)
def test_recorded_greedy_generations(name: str, kind: str, block_size: int) -> None:
    live = runtime(name)
    generator = TextGenerator(live.model, live.tokenizer, kv_cache=kind, kv_cache_block_size=block_size)
    for case in fixture(f"{name}.reference.json")["greedy"]:
        result = generator.generate(case["prompt"], case["max_new_tokens"])
        assert list(result.prompt_token_ids) == case["prompt_token_ids"]
        assert list(result.generated_token_ids) == case["generated_token_ids"]
        assert result.raw_bytes == base64.b64decode(case["raw_bytes_base64"])
        assert result.text == case["text"]


@pytest.mark.parametrize(("name", "kind"), [*((name, "paged") for name in BUNDLES), ("bpe", "contiguous")])
def test_recorded_sampled_generations(name: str, kind: str) -> None:
    live = runtime(name)
    for case in fixture(f"{name}.reference.json")["sampled"]:
        sampler = TemperatureSampler(case["temperature"], top_k=case["top_k"], seed=case["seed"])
        generator = TextGenerator(live.model, live.tokenizer, sampler, kv_cache=kind, kv_cache_block_size=3)
        result = generator.generate(case["prompt"], case["max_new_tokens"])
        assert list(result.generated_token_ids) == case["generated_token_ids"]
        assert result.raw_bytes == base64.b64decode(case["raw_bytes_base64"])


class Foreign:
    """A model without our decode path; what it returns is not a tensor either."""

    def __init__(self, model: DecoderOnlyTransformer) -> None:
        self.config = model.config
        self._model = model
        self.open = 0

    def __call__(self, token_ids: torch.Tensor) -> "ForeignLogits":
        self.open += 1
        return ForeignLogits(self, self._model(token_ids))


class ForeignLogits:
    def __init__(self, owner: Foreign, logits: torch.Tensor) -> None:
        self.shape = tuple(logits.shape)
        self.tolist = logits.tolist
        self._owner = owner

    def close(self) -> None:
        self._owner.open -= 1


def test_a_model_without_decode_gives_the_same_tokens_by_full_forwards() -> None:
    live = runtime("byte")
    foreign = Foreign(live.model)
    ours = TextGenerator(live.model, live.tokenizer).generate("the ", 30)
    theirs = TextGenerator(foreign, live.tokenizer).generate("the ", 30)
    assert theirs == ours
    assert foreign.open == 0


def test_a_model_that_returns_another_shape_is_refused() -> None:
    live = runtime("byte")
    foreign = Foreign(live.model)
    foreign._model = lambda ids: live.model(ids)[:, :-1]  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"shape \(1, 3, 29\), not \(1, 4, 29\)"):
        TextGenerator(foreign, live.tokenizer).generate("the ", 1)


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
@pytest.mark.parametrize("length", [1, 5, 6, 7, 15])
def test_rollover_is_a_full_forward_over_the_newest_window(length: int, kind: str) -> None:
    model = DecoderOnlyTransformer(ModelConfig(26, 6, 8, 2, 2, 12, random_seed=5))
    tokenizer = Tokenizer.from_spec(TokenizerSpec("byte", tuple(range(97, 123))))
    prompt = "thequickbrownfo"[:length]
    found = TextGenerator(model, tokenizer, kv_cache=kind, kv_cache_block_size=4).generate(prompt, 14)
    ids = tokenizer.encode(prompt)
    for _ in range(14):
        ids.append(int(last_logits(model, ids[-6:]).argmax()))
    assert list(found.token_ids) == ids
    assert found.raw_bytes.startswith(prompt.encode())


def test_the_last_token_is_not_decoded() -> None:
    """A context filled by prompt and all but one new token needs no replay, nor a call too many."""
    live = runtime("byte")
    calls: list[int] = []

    def counting(logits: torch.Tensor) -> int:
        calls.append(len(logits))
        return 3

    pool = PagedKvCachePool(live.model.config)
    result = TextGenerator(live.model, live.tokenizer, counting, pool=pool).generate("the ", 9)
    assert result.generated_token_ids == (3,) * 9
    assert calls == [29] * 9
    assert pool.free_block_count == pool.block_count


def test_aliases_and_parts_of_a_result() -> None:
    live = runtime("byte")
    result = TextGenerator(live.model, live.tokenizer).generate("the ", 3)
    assert result.prompt_tokens == result.prompt_token_ids == (24, 13, 10, 1)
    assert result.generated_tokens == result.generated_token_ids
    assert result.tokens == result.token_ids == result.prompt_token_ids + result.generated_token_ids


def test_zero_new_tokens_open_no_session_and_look_at_no_sampler() -> None:
    live = runtime("byte")
    generator = TextGenerator(live.model, live.tokenizer, TemperatureSampler(top_k=10_000))
    assert generator.generate("the ", 0).text == "the "
    with pytest.raises(ValueError, match="must not exceed"):
        generator.generate("the ", 1)


@pytest.mark.parametrize(
    ("prompt", "count", "error", "message"),
    [
        ("", 1, ValueError, "at least one token"),
        (b"the", 1, TypeError, "prompt must be a string"),
        ("\N{GREEK CAPITAL LETTER OMEGA}", 1, ValueError, "byte"),
        ("the ", -1, ValueError, "negative"),
        ("the ", True, TypeError, "int"),
        ("the ", 1.0, TypeError, "int"),
    ],
)
def test_wrong_requests_are_refused(prompt: str, count: int, error: type[Exception], message: str) -> None:
    live = runtime("byte")
    with pytest.raises(error, match=message):
        TextGenerator(live.model, live.tokenizer).generate(prompt, count)


def test_tokenizer_and_model_must_belong_together() -> None:
    with pytest.raises(ValueError, match="trained together"):
        TextGenerator(runtime("byte").model, runtime("bpe").tokenizer)
    with pytest.raises(ValueError, match="cache must be"):
        TextGenerator(runtime("byte").model, runtime("byte").tokenizer, kv_cache="ring")


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_the_end_of_text_token_ends_generation_and_is_no_part_of_the_result(kind: str) -> None:
    model = DecoderOnlyTransformer(ModelConfig(3, 4, 4, 2, 1, 4))
    tokenizer = Tokenizer.from_spec(TokenizerSpec("byte", (97, 98, 255)))
    script = iter([1, 0, 2, 1, 1])
    generator = TextGenerator(model, tokenizer, lambda _: next(script), kv_cache=kind)
    result = generator.generate("a", 9)
    assert result.generated_token_ids == (1, 0)
    assert (result.raw_bytes, result.text) == (b"aba", "aba")
    assert next(script) == 1  # nothing was sampled after it
    assert generator.generate("a", 1, sampler=lambda _: 2).generated_token_ids == ()


def test_text_replaces_what_is_not_utf_8() -> None:
    model = DecoderOnlyTransformer(ModelConfig(2, 4, 4, 2, 1, 4))
    tokenizer = Tokenizer.from_spec(TokenizerSpec("byte", (97, 254)))
    result = TextGenerator(model, tokenizer, lambda _: 1).generate("a", 2)
    assert result.raw_bytes == b"a\xfe\xfe"
    assert result.text == "a\ufffd\ufffd"
    assert TextGenerator(model, tokenizer).generate("a", 1, sampler=GreedySampler()).prompt_tokens == (0,)
