"""The OpenAPI document of the OpenAI routes: what clients and tests can be generated from."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from riftco.config import ServingConfig
from riftco.serving.http import openai_schema as schema

_ANSWERS: tuple[type[BaseModel], ...] = (
    schema.Completion,
    schema.ChatCompletion,
    schema.ModelList,
    schema.ModelCard,
    schema.ErrorAnswer,
)
_REQUESTS: tuple[type[BaseModel], ...] = (schema.CompletionRequest, schema.ChatRequest)
_REFUSALS = {
    "400": "The request is wrong; the message says where.",
    "401": "An API key is required, or the one given is wrong.",
    "404": "There is no such model.",
    "408": "The body did not arrive in time.",
    "415": "Content-Type is not application/json.",
    "421": "The Host header is not this server's.",
    "429": "Too much at once; `retry-after` says when to try again.",
    "500": "The model failed.",
    "503": "The server is shutting down, or has no room for the model.",
    "504": "The request's deadline has passed.",
}
_READING = ("400", "401", "404", "421")
Value = dict[str, Any]


def described(version: str, config: ServingConfig, models: Sequence[str]) -> Value:
    """The document, with the models that are served and the limits that the configuration sets."""
    paths = {
        "/v1/models": {"get": _reading("models", "The models that can be asked for.", schema.ModelList)},
        "/v1/models/{model}": {
            "get": _reading("model", "One model.", schema.ModelCard)
            | {"parameters": [_parameter("model", "Its id.", models)]}
        },
        "/v1/completions": {
            "post": _generating(
                "completions", "Continue prompts.", schema.CompletionRequest, schema.Completion
            )
        },
        "/v1/chat/completions": {
            "post": _generating("chat", "Answer a conversation.", schema.ChatRequest, schema.ChatCompletion)
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "riftco", "version": version},
        "paths": paths,
        "components": {
            "schemas": _schemas(config, models),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _schemas(config: ServingConfig, models: Sequence[str]) -> Value:
    kinds = [(kind, "validation") for kind in _REQUESTS] + [(kind, "serialization") for kind in _ANSWERS]
    _, found = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = found["$defs"]
    for kind in _REQUESTS:
        properties = schemas[kind.__name__]["properties"]
        properties["model"] = {"type": "string", "enum": list(models)}
        for name in ("max_tokens", "max_completion_tokens"):
            if name in properties:
                properties[name]["anyOf"][0]["maximum"] = config.maximum_new_tokens
    return schemas


def _reading(name: str, summary: str, answer: type[BaseModel]) -> Value:
    return {
        "operationId": name,
        "summary": summary,
        "responses": {"200": _json("The answer.", answer), **_errors(_READING)},
    }


def _generating(name: str, summary: str, request: type[BaseModel], answer: type[BaseModel]) -> Value:
    succeeded = _json("The answer, whole or as server-sent events.", answer)
    succeeded["content"]["text/event-stream"] = {}
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, **_json("", request)},
        "responses": {"200": succeeded, **_errors(tuple(_REFUSALS))},
    }


def _errors(statuses: tuple[str, ...]) -> Value:
    return {status: _json(_REFUSALS[status], schema.ErrorAnswer) for status in statuses}


def _json(description: str, model: type[BaseModel]) -> Value:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"description": description, "content": content}


def _parameter(name: str, description: str, values: Sequence[str]) -> Value:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string", "enum": list(values)},
    }
