"""Text from a prompt: encode, sample one token after another, decode.

Positions are learned and absolute, so a full context cannot slide: once it is full, every further token
replays the newest `maximum_context` tokens from position 0, here as one batched forward. Dropping the oldest
page instead would give other logits than the contract's full forward over the cropped window.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from artifacts import ModelConfig
from riftco.serving.page_pool import PagedKvCachePool
from riftco.serving.samplers import GreedySampler, Logits, Sampler
from riftco.serving.session import DecodeSession, cache_kind
from riftco.tokenizer import Tokenizer

NextLogits = Callable[[Sequence[int]], Logits]
"""From all token ids so far to the logits `[V]` of the next token."""


class CallableModel(Protocol):
    """A model that is not ours: int64 ids `[1, T]` to logits `[1, T, V]`, a tensor or an object like one."""

    @property
    def config(self) -> ModelConfig: ...
    def __call__(self, token_ids: torch.Tensor, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What was asked and what came of it; bytes and text cover the whole prompt and the generated tokens."""

    prompt_token_ids: tuple[int, ...]
    generated_token_ids: tuple[int, ...]
    raw_bytes: bytes

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and generated ids."""
        return self.prompt_token_ids + self.generated_token_ids

    @property
    def text(self) -> str:
        """The bytes as UTF-8, each undecodable part replaced by U+FFFD."""
        return self.raw_bytes.decode("utf-8", errors="replace")

    prompt_tokens = property(lambda self: self.prompt_token_ids, doc="The same as `prompt_token_ids`.")
    generated_tokens = property(
        lambda self: self.generated_token_ids, doc="The same as `generated_token_ids`."
    )
    tokens = property(lambda self: self.token_ids, doc="The same as `token_ids`.")


class TextGenerator:
    """Continues prompts with one model, tokenizer and sampler (greedy unless given).

    A model with our decode path runs over a key/value cache; any other callable with a `config` runs full
    forwards on the same window. `pool` is shared page storage for the sessions. ValueError for an unknown
    cache or a tokenizer whose vocabulary is not the model's.
    """

    def __init__(
        self,
        model: CallableModel,
        tokenizer: Tokenizer,
        sampler: Sampler | None = None,
        *,
        kv_cache: str | int = "paged",
        kv_cache_block_size: int = 16,
        pool: PagedKvCachePool | None = None,
    ) -> None:
        if tokenizer.vocab_size != model.config.vocabulary_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} tokens but the model "
                f"{model.config.vocabulary_size}; use the pair that was trained together"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.sampler: Sampler = sampler if sampler is not None else GreedySampler()
        self.kv_cache = cache_kind(kv_cache)
        self.kv_cache_block_size = kv_cache_block_size
        self._pool = pool

    def generate(
        self, prompt: str, max_new_tokens: int = 32, *, sampler: Sampler | None = None
    ) -> GenerationResult:
        """`max_new_tokens` more tokens, or those before the end-of-text token of a tokenizer that has one.

        A prompt longer than the context is cropped to its newest tokens for the model, not in the result.
        `sampler` replaces the generator's own for this call. TypeError and ValueError for a prompt that is
        not a text of at least one token of the vocabulary, or a count that is not an integer >= 0.
        """
        require_count(max_new_tokens)
        if not isinstance(prompt, str):
            raise TypeError("prompt must be a string")
        prompt_ids = list(self.tokenizer.encode(prompt))
        if not prompt_ids:
            raise ValueError("prompt must encode to at least one token")
        token_ids = self._extended(prompt_ids, max_new_tokens, self.sampler if sampler is None else sampler)
        raw_bytes = self.tokenizer.decode_bytes(token_ids)
        count = len(prompt_ids)
        return GenerationResult(tuple(token_ids[:count]), tuple(token_ids[count:]), raw_bytes)

    def _extended(self, prompt_ids: list[int], max_new_tokens: int, sampler: Sampler) -> list[int]:
        token_ids = list(prompt_ids)
        if max_new_tokens:
            with ExitStack() as resources:
                next_logits, end = self._open(resources), self.tokenizer.end_of_text_id
                for _ in range(max_new_tokens):
                    token_id = sampler(next_logits(token_ids))
                    if token_id == end:
                        break
                    token_ids.append(token_id)
        return token_ids

    def _open(self, resources: ExitStack) -> NextLogits:
        if not hasattr(self.model, "decode"):
            return full_forward_logits(self.model)
        session = DecodeSession(self.model, self.kv_cache, self.kv_cache_block_size, pool=self._pool)  # type: ignore[arg-type]
        return session_logits(resources.enter_context(session))


def session_logits(session: DecodeSession) -> NextLogits:
    """Logits over an empty session: prefill at first, then one token a call, and replay when it is full."""

    def next_logits(token_ids: Sequence[int]) -> Logits:
        if 0 < session.size < session.capacity:
            return session.step(token_ids[-1])
        session.reset()
        return session.extend(token_ids[-session.capacity :])

    return next_logits


def full_forward_logits(model: CallableModel) -> NextLogits:
    """Logits of a model without a decode path: a full forward over the newest `maximum_context` tokens."""

    def next_logits(token_ids: Sequence[int]) -> Logits:
        window = torch.tensor([token_ids[-model.config.maximum_context :]], dtype=torch.int64)
        with torch.no_grad():
            logits = model(window)
        expected = (1, window.shape[1], model.config.vocabulary_size)
        if tuple(logits.shape) != expected:
            raise ValueError(f"the model returned logits of shape {tuple(logits.shape)}, not {expected}")
        rows = logits.tolist()
        if hasattr(logits, "close"):
            logits.close()
        return rows[0][-1]

    return next_logits


def require_count(max_new_tokens: int, limit: int | None = None) -> None:
    """TypeError unless an int (a bool is none); ValueError if it is negative or above the serving limit."""
    if type(max_new_tokens) is not int:
        raise TypeError("max_new_tokens must be an int")
    if max_new_tokens < 0:
        raise ValueError("max_new_tokens must not be negative")
    if limit is not None and max_new_tokens > limit:
        raise ValueError(f"max_new_tokens exceeds the serving limit {limit}")
