"""The HTTP routes over one service: the chat page, health, generation.

Generation runs in a worker thread and waits for the service's lock there; health never waits. See
`docs/compatibility.md` for the few deliberate differences from the original server.
"""

import json
import logging
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from riftco.serving.answers import html_answer, json_answer, refusal_answer
from riftco.serving.generator import GenerationResult
from riftco.serving.guard import RequestGuard
from riftco.serving.request_policy import Refusal, RequestPolicy, is_loopback
from riftco.serving.service import ModelService

_FIELDS = frozenset({"prompt", "max_new_tokens", "temperature", "top_k", "seed"})
_BODY_SECONDS = 30.0
_logger = logging.getLogger("riftco.serving")


def create_app(
    service: ModelService, *, host: str = "127.0.0.1", body_seconds: float = _BODY_SECONDS
) -> FastAPI:
    """The ASGI application over a service, which stays the caller's to close.

    `host` is the address it will be bound to: on a loopback one only loopback Host headers are served.
    `body_seconds` is how long a request's body may take to arrive.
    """
    app = FastAPI(title="riftco", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _add_routes(app, service)
    policy = RequestPolicy(
        routes={route.path: next(iter(route.methods)) for route in app.routes},  # type: ignore[attr-defined]
        requires_loopback_host=is_loopback(host),
        maximum_request_bytes=service.config.maximum_request_bytes,
    )
    app.state.request_policy = policy
    app.add_middleware(RequestGuard, policy=policy, body_seconds=body_seconds)
    return app


def _add_routes(app: FastAPI, service: ModelService) -> None:
    page = files("riftco.serving").joinpath("chat.html").read_bytes()

    @app.get("/")
    @app.get("/chat")
    async def chat() -> Response:
        return html_answer(page)

    @app.get("/health")
    @app.get("/v1/health")
    async def health() -> Response:
        return json_answer(service.health())

    @app.post("/v1/generate")
    async def generate(request: Request) -> Response:
        body = await request.body()
        try:
            return json_answer(await run_in_threadpool(_generate, service, body))
        except (TypeError, ValueError) as error:
            return refusal_answer(Refusal(HTTPStatus.BAD_REQUEST, str(error)))
        except Exception:
            _logger.exception("generation failed")
            return refusal_answer(Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "generation failed"))


def _generate(service: ModelService, body: bytes) -> dict[str, Any]:
    fields = request_fields(body)
    prompt_bytes = fields["prompt"].encode("utf-8")  # UnicodeEncodeError, a ValueError, for lone surrogates
    return _answer(service.artifact_id, fields["prompt"], prompt_bytes, service.generate(**fields))


def request_fields(body: bytes) -> dict[str, Any]:
    """The fields of a generation request; a field given twice counts the last time.

    TypeError or ValueError unless the body is a UTF-8 JSON object with a text `prompt` and known fields.
    """
    try:
        value = json.loads(body.decode("utf-8"))
    except RecursionError:
        raise ValueError("request JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("request JSON must be an object")
    unknown = sorted(value.keys() - _FIELDS)
    if unknown:
        raise ValueError(f"unknown request fields: {', '.join(unknown)}")
    if "prompt" not in value:
        raise ValueError("request requires prompt")
    if not isinstance(value["prompt"], str):
        raise TypeError("prompt must be a string")
    return value


def _answer(artifact_id: str, prompt: str, prompt_bytes: bytes, result: GenerationResult) -> dict[str, Any]:
    generated = result.raw_bytes[len(prompt_bytes) :]
    return {
        "artifact_id": artifact_id,
        "prompt": prompt,
        "text": result.text,
        "generated_text": generated.decode("utf-8", errors="replace"),
        "prompt_token_ids": result.prompt_token_ids,
        "generated_token_ids": result.generated_token_ids,
        "token_ids": result.token_ids,
    }
