"""One request through the streaming completions route, with the time of everything that comes back."""

import json
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx
from httpx_sse import SSEError, aconnect_sse


@dataclass(slots=True)
class Outcome:
    """What one request brought; times are seconds since it was sent."""

    arrivals: list[float] = field(default_factory=list)
    """Of each piece of text; a server sends one per token, or fewer."""
    seconds: float = 0.0
    """Until the end of the stream."""
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    error: str | None = None
    """Why it failed; its times then mean nothing."""

    @property
    def gaps(self) -> list[float]:
        """Between one piece of text and the next."""
        return [later - sooner for sooner, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def complete(client: httpx.AsyncClient, body: dict[str, object]) -> Outcome:
    """Send a streaming request and read its answer to the end; a failure is in the outcome's `error`."""
    outcome, sent = Outcome(), perf_counter()
    try:
        async with aconnect_sse(client, "POST", "/v1/completions", json=body) as source:
            if source.response.status_code != 200:
                await source.response.aread()
                raise _Failed(_refusal(source.response))
            ended = False
            async for event in source.aiter_sse():
                ended = event.data == "[DONE]"
                if not ended:
                    _take(outcome, json.loads(event.data), perf_counter() - sent)
            if not ended:
                raise _Failed("the stream broke off before [DONE]")
    except (httpx.HTTPError, SSEError, _Failed) as error:
        outcome.error = str(error) or type(error).__name__
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        outcome.error = f"not a stream of completions: {error!r}"
    outcome.seconds = perf_counter() - sent
    return outcome


class _Failed(Exception):
    """The server's answer says that there is no result."""


def _take(outcome: Outcome, chunk: dict[str, Any], now: float) -> None:
    """Add one event of the stream to the outcome."""
    if chunk.get("error"):
        raise _Failed(_message(chunk["error"]))
    for choice in chunk["choices"]:
        if choice["text"] or choice.get("finish_reason") is None:
            outcome.arrivals.append(now)
            outcome.text += choice["text"]
            outcome.new_tokens += 1  # until the usage tells the number of tokens
    usage = chunk.get("usage")
    if usage:
        outcome.prompt_tokens, outcome.new_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _refusal(response: httpx.Response) -> str:
    """One line: the status and the server's message, if it has one."""
    try:
        message = _message(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    return f"HTTP {response.status_code}: {' '.join(message.split())}"


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
