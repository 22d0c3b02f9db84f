"""One bundle as a service: what a request may ask for, one generation at a time, and who is answering.

The original's single lock serialises generation and health; here only generation waits for it, so that a
health check answers while a long generation runs.
"""

from threading import Lock
from types import TracebackType
from typing import Any, Self

from artifacts import ModelBundle
from riftco.config import ServingConfig
from riftco.runtime import snapshot_of
from riftco.serving.generator import GenerationResult, require_count
from riftco.serving.samplers import GreedySampler, Sampler, TemperatureSampler, checked_temperature
from riftco.serving.stack import ServingStack


class ModelService:
    """A live bundle; a context manager. After `close` every call raises RuntimeError.

    ValueError for a bundle that contradicts itself, BackendUnavailableError for an absent backend.
    """

    def __init__(self, bundle: ModelBundle, config: ServingConfig | None = None) -> None:
        self.config = config if config is not None else ServingConfig()
        stack = ServingStack(snapshot_of(bundle), self.config)
        self._stack: ServingStack | None = stack
        self._lock = Lock()
        self._health: dict[str, Any] = {
            "status": "ok",
            "artifact_id": bundle.artifact_id,
            "artifact_stage": bundle.stage,
            "backend": stack.model.backend,
            "vocabulary_size": bundle.config.vocabulary_size,
            "maximum_context": bundle.config.maximum_context,
            "maximum_new_tokens": self.config.maximum_new_tokens,
            "kv_cache": self.config.kv_cache,
            "kv_cache_block_size": self.config.kv_cache_block_size,
        }

    @property
    def artifact_id(self) -> str:
        return self._health["artifact_id"]

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
        temperature, then top_k and seed, then the prompt.
        """
        require_count(max_new_tokens, self.config.maximum_new_tokens)
        sampler = _sampler(temperature, top_k, seed)
        with self._lock:
            return self._open_stack().generate(prompt, max_new_tokens=max_new_tokens, sampler=sampler)

    def health(self) -> dict[str, Any]:
        """What is served and how, without waiting for a generation."""
        self._open_stack()
        return dict(self._health)

    def close(self) -> None:
        """Wait for the running generation, then let go of the model; harmless when repeated."""
        with self._lock:
            self._stack = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_stack(self) -> ServingStack:
        stack = self._stack
        if stack is None:
            raise RuntimeError("the model service is closed")
        return stack


def _sampler(temperature: float, top_k: int | None, seed: int) -> Sampler:
    if checked_temperature(temperature) > 0:
        return TemperatureSampler(temperature, top_k=top_k, seed=seed)
    if top_k is not None:
        raise ValueError("top_k requires temperature greater than zero")
    return GreedySampler()
