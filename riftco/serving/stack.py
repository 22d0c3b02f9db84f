"""Serving an in-memory snapshot: model, tokenizer, one page pool and a generator; nothing of training."""

from riftco.backends import resolve_backend
from riftco.config import ServingConfig
from riftco.model import ModelSnapshot
from riftco.serving.generator import GenerationResult, TextGenerator, require_count
from riftco.serving.page_pool import PagedKvCachePool
from riftco.serving.samplers import Sampler
from riftco.tokenizer import Tokenizer


class ServingStack:
    """A snapshot ready to generate; its request caches share one pool of pages.

    `kv_cache_block_count` is the pool's size in pages, 0 for exactly one full context: a pool of n contexts
    serves n generations at a time, more fail with "exhausted". ValueError when tokenizer and model disagree
    about the vocabulary, BackendUnavailableError when the machine lacks the backend.
    """

    def __init__(
        self,
        snapshot: ModelSnapshot,
        config: ServingConfig | None = None,
        *,
        kv_cache_block_count: int = 0,
    ) -> None:
        self.config = config if config is not None else ServingConfig(backend="cpu")
        self.model = snapshot.build().move_to(resolve_backend(self.config.backend))
        self.tokenizer = Tokenizer.from_spec(snapshot.tokenizer)
        self.pool: PagedKvCachePool | None = None
        if self.config.kv_cache == "paged":
            self.pool = PagedKvCachePool(
                snapshot.config,
                block_size=self.config.kv_cache_block_size,
                block_count=kv_cache_block_count,
                backend=self.model.backend,
            )
        self._generator = TextGenerator(
            self.model,
            self.tokenizer,
            kv_cache=self.config.kv_cache,
            kv_cache_block_size=self.config.kv_cache_block_size,
            pool=self.pool,
        )

    def generate(
        self, prompt: str, *, max_new_tokens: int = 32, sampler: Sampler | None = None
    ) -> GenerationResult:
        """Continue a prompt, greedily or with the caller's sampler.

        Errors as `TextGenerator.generate`; ValueError above the configured maximum_new_tokens.
        """
        require_count(max_new_tokens, self.config.maximum_new_tokens)
        return self._generator.generate(prompt, max_new_tokens, sampler=sampler)
