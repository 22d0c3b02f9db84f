"""The load itself: for each level so many requests in flight until all are answered."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from riftco.bench_serve.client import Outcome, complete
from riftco.bench_serve.load import Load, WritePrompt, id_prompts, word_prompts
from riftco.errors import InputError

Progress = Callable[["Level"], None]
"""Is told the level whenever one of its requests has ended."""


@dataclass(slots=True)
class Level:
    """The outcomes at one number of requests in flight, also of a level that was broken off."""

    concurrency: int
    requests: int
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """By the number of the request."""
    failed: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    client_seconds: float = 0.0
    """Processor time of the measuring process itself."""

    def add(self, request: int, outcome: Outcome, seconds: float) -> None:
        """A request has ended, so many seconds after the level began."""
        self.outcomes[request] = outcome
        self.seconds = seconds
        if outcome.error is None:
            self.new_tokens += outcome.new_tokens
        else:
            self.failed += 1


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is and how it is spoken to."""

    url: str
    model: str | None = None
    """Its name for the model; the first that it lists by default."""
    api_key: str | None = None
    timeout: float = 120.0
    """Seconds without a byte after which a request has failed."""

    @asynccontextmanager
    async def client(self, connections: int) -> AsyncIterator[httpx.AsyncClient]:
        """A pool of connections, made directly: a proxy would be measured with the server."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        async with httpx.AsyncClient(
            base_url=self.url.removesuffix("/").removesuffix("/v1"),
            headers=headers,
            limits=limits,
            timeout=self.timeout,
            trust_env=False,
        ) as client:
            yield client


async def sweep(
    server: Server, load: Load, concurrencies: Sequence[int], levels: list[Level], progress: Progress
) -> None:
    """Run a level for each concurrency; `levels` grows as they begin and holds what there is at any time.

    InputError if the server is not there or refuses the first request, which is not counted.
    """
    async with server.client(max(concurrencies)) as client:
        model = server.model or await _first_model(client)
        write = await _prompts(client, model, load)
        for number, concurrency in enumerate(concurrencies):
            level = Level(concurrency, load.requests)
            levels.append(level)
            await _run(client, model, load, write, number, level, progress)


async def _run(
    client: httpx.AsyncClient,
    model: str,
    load: Load,
    write: WritePrompt,
    number: int,
    level: Level,
    progress: Progress,
) -> None:
    bodies = enumerate([load.body(model, write(number, i), i) for i in range(load.requests)])

    async def work() -> None:
        for request, body in bodies:
            outcome = await complete(client, body)
            level.add(request, outcome, time.perf_counter() - began)
            progress(level)

    began, cpu = time.perf_counter(), time.process_time()
    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(level.concurrency, load.requests)):
                workers.create_task(work())
    finally:
        level.client_seconds = time.process_time() - cpu


async def _first_model(client: httpx.AsyncClient) -> str:
    listed = await _get(client, "/v1/models")
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise InputError(f"{client.base_url}: lists no model at /v1/models; name one with --model") from None


async def _prompts(client: httpx.AsyncClient, model: str, load: Load) -> WritePrompt:
    """Token ids where the server tells the model's vocabulary, as ours does of the default one; else words,
    measured by an answer."""
    health = await _get(client, "/health", optional=True)
    described = isinstance(health, dict) and health.get("models", [model])[:1] == [model]
    vocabulary = health.get("vocabulary_size") if described else None
    if isinstance(vocabulary, int):
        write = id_prompts(load, vocabulary)
        await _first(client, load.body(model, write(-1, 0), 0))
        return write
    trial = word_prompts(load, 1.0)(-1, 0)
    assert isinstance(trial, str)
    words = trial.split()[:64]
    outcome = await _first(client, load.body(model, " ".join(words), 0))
    return word_prompts(load, (outcome.prompt_tokens or len(words)) / len(words))


async def _first(client: httpx.AsyncClient, body: dict[str, object]) -> Outcome:
    """A request before the others: it warms the server up and shows what would fail."""
    outcome = await complete(client, body)
    if outcome.error is not None:
        remedy = "--prompt-tokens and --new-tokens say what is asked"
        raise InputError(f"{client.base_url}: the first request failed: {outcome.error}; {remedy}")
    return outcome


async def _get(client: httpx.AsyncClient, path: str, optional: bool = False) -> Any:
    try:
        response = await client.get(path)
        return response.raise_for_status().json()
    except httpx.HTTPStatusError as error:
        if optional:
            return None
        raise InputError(f"{client.base_url}: {path} answers HTTP {error.response.status_code}") from None
    except httpx.HTTPError as error:
        raise InputError(
            f"{client.base_url}: {error or type(error).__name__}; is a server running there?"
        ) from None
    except ValueError:
        if optional:
            return None
        raise InputError(f"{client.base_url}: {path} answers no JSON") from None
