"""The HTTP application over one or several models: which path is answered by what.

Nothing here waits: generation is the engine's, loading and tokenizing run in worker threads, and health is
told from the event loop. See `docs/compatibility.md` for the few deliberate differences from the original.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from riftco.serving.http.access import Access
from riftco.serving.http.answers import html_answer, json_answer, protective_headers, refusal_answer
from riftco.serving.http.dispatch import Dispatch
from riftco.serving.http.generate_route import PATH as GENERATE
from riftco.serving.http.generate_route import generate_handler
from riftco.serving.http.guard import RequestGuard
from riftco.serving.http.limits import Progress, TimeLimits
from riftco.serving.http.metrics import CONTENT_TYPE, Metrics
from riftco.serving.http.openai_routes import (
    CHAT,
    COMPLETIONS,
    MODELS,
    chat_handler,
    completions_handler,
    model_handler,
    models_handler,
)
from riftco.serving.http.openapi import described
from riftco.serving.http.page import page
from riftco.serving.http.request_policy import Refusal, RequestPolicy, is_loopback
from riftco.serving.http.shelf import Shelf
from riftco.serving.service import ModelService


def create_app(
    models: Shelf | ModelService,
    *,
    host: str = "127.0.0.1",
    access: Access | None = None,
    limits: TimeLimits | None = None,
) -> FastAPI:
    """The ASGI application over models, which stay the caller's to close.

    `host` is the address it will be bound to: on a loopback one only loopback Host headers are served.
    `access` holds the API keys, without which everybody may ask. `limits` says how long clients may take.
    """
    shelf = Shelf.of(models) if isinstance(models, ModelService) else models
    access = access if access is not None else Access()
    limits = limits if limits is not None else TimeLimits()
    progress, metrics = Progress(), Metrics(shelf)
    app = FastAPI(title="riftco", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _add_routes(app, Dispatch(shelf, metrics), access, progress)
    policy = RequestPolicy(
        routes=_methods(app),
        requires_loopback_host=is_loopback(host),
        maximum_request_bytes=shelf.config.maximum_request_bytes,
    )
    app.state.request_policy, app.state.time_limits, app.state.progress = policy, limits, progress
    app.add_middleware(
        RequestGuard, policy=policy, access=access, limits=limits, progress=progress, metrics=metrics
    )
    return app


def _add_routes(app: FastAPI, dispatch: Dispatch, access: Access, progress: Progress) -> None:
    shelf, metrics = dispatch.shelf, dispatch.metrics
    document, policy = page()
    openapi_document = described(app.version, shelf.config, shelf.names)

    async def chat(request: Request) -> Response:
        return html_answer(document, policy)

    async def health(request: Request) -> Response:
        value = _health(shelf) | {"keys": access.required, "models": list(shelf.names)}
        healthy = value["status"] == "ok"
        return json_answer(value, HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE)

    async def ready(request: Request) -> Response:
        reason = _not_ready(shelf, progress)
        if reason is None:
            return json_answer({"status": "ready"})
        refusal = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, reason, retry_after=1)
        return refusal_answer(refusal, request.scope["path"])

    async def figures(request: Request) -> Response:
        return Response(metrics.text(), 200, protective_headers(), CONTENT_TYPE)

    async def openapi(request: Request) -> Response:
        return json_answer(openapi_document)

    for path in ("/", "/chat"):
        app.add_api_route(path, chat)
    for path in ("/health", "/v1/health"):
        app.add_api_route(path, health)
    app.add_api_route("/ready", ready)
    app.add_api_route("/metrics", figures)
    app.add_api_route("/openapi.json", openapi)
    app.add_api_route(GENERATE, generate_handler(dispatch), methods=["POST"])
    app.add_api_route(COMPLETIONS, completions_handler(dispatch), methods=["POST"])
    app.add_api_route(CHAT, chat_handler(dispatch), methods=["POST"])
    app.add_api_route(MODELS, models_handler(dispatch))
    app.add_api_route(f"{MODELS}/{{model:path}}", model_handler(dispatch))


def _methods(app: FastAPI) -> Mapping[str, str]:
    """The method of each path; a path that ends in a parameter stands for the folder of all its values."""
    routes: list[Any] = list(app.routes)
    return {route.path.partition("{")[0]: next(iter(route.methods)) for route in routes}


def _health(shelf: Shelf) -> dict[str, Any]:
    """The default model's health, with the status of whichever loaded model is not well."""
    found = {name: value for name in shelf.names if (value := _health_of(shelf, name)) is not None}
    ill = (value["status"] for value in found.values() if value["status"] != "ok")
    return {"status": "ok"} | found.get(shelf.default, {}) | {"status": next(ill, "ok")}


def _health_of(shelf: Shelf, name: str) -> dict[str, Any] | None:
    """A loaded model's health; `stopped` if its engine has ended, which it does only by a failure of ours."""
    service = shelf.loaded(name)
    try:
        return None if service is None else service.health()
    except RuntimeError:
        return {"status": "stopped"} if shelf.loaded(name) is service else None  # unloaded meanwhile


def _not_ready(shelf: Shelf, progress: Progress) -> str | None:
    """Why no further request should be sent here, if so."""
    if progress.draining:
        return "the server is shutting down"
    if shelf.closed:
        return "the models are unloaded"
    services = [service for name in shelf.names if (service := shelf.loaded(name)) is not None]
    status = _health(shelf)["status"]
    if status != "ok":
        return f"the engine is {status}"
    return "the queue is full" if services and all(map(_is_full, services)) else None


def _is_full(service: ModelService) -> bool:
    stats, config = service.engine.stats(), service.config
    return stats.running + stats.waiting >= config.maximum_running + config.maximum_waiting
