"""One bundle as a service: what a request may ask for, the engine that answers many at once, its health."""

import math
from types import TracebackType
from typing import Any, Self

from artifacts import ModelBundle
from riftco.backends import resolve_backend
from riftco.chat_template import PLAIN, ChatTemplate, chat_template
from riftco.config import ServingConfig
from riftco.serving.engine import (
    Engine,
    Event,
    GenerationRequest,
    ModelRunner,
    PagePool,
    SamplingParams,
    Scheduler,
    generate,
)
from riftco.serving.generator import GenerationResult, require_count
from riftco.tokenizer import Tokenizer


class ModelService:
    """A live bundle; a context manager. After `close` every call raises RuntimeError.

    ValueError for too few pages, BackendUnavailableError for an absent backend.
    """

    def __init__(self, bundle: ModelBundle, config: ServingConfig | None = None) -> None:
        self.config = config = config if config is not None else ServingConfig()
        self.artifact_id = bundle.artifact_id
        self.maximum_context = bundle.config.maximum_context
        self.tokenizer = Tokenizer.from_spec(bundle.tokenizer)
        self._metadata = bundle.metadata
        backend = resolve_backend(config.backend)
        scheduler = _scheduler(config, self.maximum_context, self.tokenizer.end_of_text_id)
        runner = ModelRunner(
            bundle,
            page_count=scheduler.pool.page_count,
            page_size=scheduler.page_size,
            backend=backend,
            weights=config.weights,
            mode=config.mode,
            threads=config.threads,
        )
        self._health: dict[str, Any] = {
            "artifact_id": bundle.artifact_id,
            "artifact_stage": bundle.stage,
            "backend": backend,
            "vocabulary_size": bundle.config.vocabulary_size,
            "maximum_context": self.maximum_context,
            "maximum_new_tokens": config.maximum_new_tokens,
            "kv_cache": config.kv_cache,
            "kv_cache_block_size": config.kv_cache_block_size,
            "mode": config.mode,
            "weights": config.weights,
            "batch_invariant": runner.is_batch_invariant(),
            "template": self._metadata.get("formatter", PLAIN.name),
        }
        self.engine = Engine(
            scheduler, runner, self.tokenizer.vocabulary, maximum_waiting=config.maximum_waiting
        )

    @property
    def template(self) -> ChatTemplate:
        """How conversations are rendered for this model; ValueError if its formatter is unknown here."""
        return chat_template(self._metadata)

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> GenerationResult:
        """Continue a prompt; temperature 0 is greedy and does not look at the seed.

        TypeError and ValueError name the field that is wrong; the count is checked first, then the
        temperature, then top_k and seed, then the prompt. QueueFullError when too much waits.
        """
        require_count(max_new_tokens, self.config.maximum_new_tokens)
        sampling = contract_sampling(temperature, top_k, seed)
        prompt_ids = self.prompt_ids(prompt)
        generated: list[int] = []
        if max_new_tokens:
            request = GenerationRequest(
                prompt_ids, max_new_tokens, sampling, seconds=self.config.request_seconds
            )
            for event in generate(self.engine, request):
                _require_success(event)
                generated += event.token_ids
        elif self.engine.closed:
            raise RuntimeError("the model service is closed")
        raw_bytes = self.tokenizer.decode_bytes([*prompt_ids, *generated])
        return GenerationResult(prompt_ids, tuple(generated), raw_bytes)

    def prompt_ids(self, prompt: str) -> tuple[int, ...]:
        """The token ids of a prompt; TypeError or ValueError if it is no text of at least one token."""
        if not isinstance(prompt, str):
            raise TypeError("prompt must be a string")
        prompt_ids = tuple(self.tokenizer.encode(prompt))
        if not prompt_ids:
            raise ValueError("prompt must encode to at least one token")
        return prompt_ids

    def health(self) -> dict[str, Any]:
        """What is served and how, without waiting for the engine; `stalled` when its steps have stopped."""
        if self.engine.closed:
            raise RuntimeError("the model service is closed")
        stalled = self.engine.heartbeat_age > self.config.stall_seconds
        return {"status": "stalled" if stalled else "ok", **self._health}

    def close(self) -> None:
        """Refuse new requests, finish those at work, then let go of the model; harmless when repeated."""
        self.engine.close(drain=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def page_layout(config: ServingConfig, context: int) -> tuple[int, int]:
    """Tokens of a page and the number of pages for a model of that context."""
    # The contiguous cache is one page that holds a whole context; none is longer.
    size = min(config.kv_cache_block_size, context) if config.kv_cache == "paged" else context
    return size, config.kv_cache_block_count or config.maximum_running * math.ceil(context / size)


def require_servable(bundle: ModelBundle, config: ServingConfig) -> None:
    """ValueError where a service could not be made of a bundle: too few pages, a tokenizer that is none."""
    tokenizer = Tokenizer.from_spec(bundle.tokenizer)
    _scheduler(config, bundle.config.maximum_context, tokenizer.end_of_text_id)


def _scheduler(config: ServingConfig, context: int, end_of_text_id: int | None) -> Scheduler:
    page_size, pages = page_layout(config, context)
    return Scheduler(
        PagePool(pages),
        page_size,
        context,
        config.maximum_running,
        config.step_tokens,
        prefix_cache=config.prefix_cache,
        end_of_text_id=end_of_text_id,
    )


def contract_sampling(temperature: float, top_k: int | None, seed: int) -> SamplingParams:
    """The contract's settings: greedy does not look at the seed and knows no top_k; errors name the field."""
    greedy = SamplingParams(temperature)
    if temperature > 0:
        return SamplingParams(temperature, top_k, seed=seed)
    if top_k is not None:
        raise ValueError("top_k requires temperature greater than zero")
    return greedy


def _require_success(event: Event) -> None:
    if event.finish in ("error", "cancelled", "timeout"):
        raise RuntimeError(event.error or f"the generation was ended: {event.finish}")
