"""The OpenAI routes: models, completions, chat completions."""

import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from riftco.serving.http.answers import json_answer
from riftco.serving.http.dispatch import Client, Dispatch, Handler, answering, in_thread
from riftco.serving.http.events import EventStream
from riftco.serving.http.openai_answers import ChatStyle, CompletionStyle, Style, Value, Writer
from riftco.serving.http.openai_requests import Request as Asked
from riftco.serving.http.openai_requests import Task, chat_task, completion_task, parse_request
from riftco.serving.http.openai_schema import ChatRequest, CompletionRequest
from riftco.serving.http.request_policy import Refusal, RefusedError
from riftco.serving.service import ModelService

MODELS, COMPLETIONS, CHAT = "/v1/models", "/v1/completions", "/v1/chat/completions"


def completions_handler(dispatch: Dispatch) -> Handler:
    """`POST /v1/completions`."""

    return answering(partial(_answer, dispatch, CompletionRequest, completion_task, CompletionStyle()))


def chat_handler(dispatch: Dispatch) -> Handler:
    """`POST /v1/chat/completions`."""

    return answering(partial(_answer, dispatch, ChatRequest, chat_task, ChatStyle()))


def models_handler(dispatch: Dispatch) -> Handler:
    """`GET /v1/models`."""
    created = int(time.time())

    @answering
    async def models(request: Request) -> Response:
        cards = [_card(name, created) for name in dispatch.shelf.names]
        return json_answer({"object": "list", "data": cards})

    return models


def model_handler(dispatch: Dispatch) -> Handler:
    """`GET /v1/models/{model}`."""
    created = int(time.time())

    @answering
    async def model(request: Request) -> Response:
        name = unquote(request.scope["path"].removeprefix(f"{MODELS}/"))
        if name not in dispatch.shelf.names:
            detail = f"the model {name!r} does not exist"
            raise RefusedError(Refusal(HTTPStatus.NOT_FOUND, detail, code="model_not_found", param="model"))
        return json_answer(_card(name, created))

    return model


def _card(name: str, created: int) -> Value:
    return {"id": name, "object": "model", "created": created, "owned_by": "riftco"}


async def _answer(
    dispatch: Dispatch,
    kind: type[Asked],
    prepare: Callable[[Asked, ModelService, bytes], Task],
    style: Style,
    request: Request,
) -> Response:
    client, body = Client.of(request), await request.body()
    asked = await in_thread(parse_request, body, kind)
    service = await dispatch.borrow(asked.model, client)
    task = await in_thread(prepare, asked, service, client.salt)
    queue = dispatch.submit(task.service, task.asked.model, task.generations, client)
    writer, headers = Writer(task, style), {"X-Riftco-Seed": str(task.seed)}
    if task.asked.stream:
        return EventStream(writer.chunks(queue), headers)
    await writer.collect(queue)
    return await in_thread(lambda: json_answer(writer.whole(), headers=headers))
