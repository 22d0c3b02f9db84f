"""The OpenAI routes: models, completions, chat completions."""

import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from urllib.parse import unquote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from riftco.serving.http.answers import json_answer
from riftco.serving.http.dispatch import Client, Dispatch, Handler, answering
from riftco.serving.http.events import EventStream
from riftco.serving.http.openai_answers import ChatStyle, CompletionStyle, Style, Value, Writer
from riftco.serving.http.openai_requests import Task, chat_task, completion_task, parse_request
from riftco.serving.http.openai_schema import ChatRequest, CompletionRequest
from riftco.serving.http.request_policy import Refusal, RefusedError

MODELS, COMPLETIONS, CHAT = "/v1/models", "/v1/completions", "/v1/chat/completions"


def completions_handler(dispatch: Dispatch) -> Handler:
    """`POST /v1/completions`."""

    def prepare(body: bytes, client: Client) -> Task:
        return completion_task(parse_request(body, CompletionRequest), dispatch, client)

    return answering(partial(_answer, dispatch, prepare, CompletionStyle()))


def chat_handler(dispatch: Dispatch) -> Handler:
    """`POST /v1/chat/completions`."""

    def prepare(body: bytes, client: Client) -> Task:
        return chat_task(parse_request(body, ChatRequest), dispatch, client)

    return answering(partial(_answer, dispatch, prepare, ChatStyle()))


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
    dispatch: Dispatch, prepare: Callable[[bytes, Client], Task], style: Style, request: Request
) -> Response:
    client, body = Client.of(request), await request.body()
    task = await run_in_threadpool(prepare, body, client)
    queue = dispatch.submit(task.service, task.asked.model, task.generations, client)
    writer, headers = Writer(task, style), {"X-Riftco-Seed": str(task.seed)}
    if task.asked.stream:
        return EventStream(writer.chunks(queue), headers)
    return json_answer(await writer.whole(queue), headers=headers)
