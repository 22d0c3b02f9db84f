"""Generation and service: page pool, request caches, decode session, samplers, generator, HTTP.

Nothing here knows training or its data.
"""

from riftco.serving.generator import GenerationResult, TextGenerator
from riftco.serving.http import Access, Shelf, TimeLimits, background_server, create_app, new_key, serve
from riftco.serving.kv_cache import ContiguousKvCache, PagedKvCache
from riftco.serving.page_pool import PagedKvCachePool
from riftco.serving.samplers import GreedySampler, TemperatureSampler
from riftco.serving.service import ModelService
from riftco.serving.session import DecodeSession
from riftco.serving.stack import ServingStack

__all__ = [
    "Access",
    "ContiguousKvCache",
    "DecodeSession",
    "GenerationResult",
    "GreedySampler",
    "ModelService",
    "PagedKvCache",
    "PagedKvCachePool",
    "ServingStack",
    "Shelf",
    "TemperatureSampler",
    "TextGenerator",
    "TimeLimits",
    "background_server",
    "create_app",
    "new_key",
    "serve",
]
