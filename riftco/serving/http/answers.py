"""The answers of the HTTP service: compact JSON or the chat page, each with the same protective headers.

An error has one of two shapes. Clients of the original know `{"error": phrase, "detail": message}`, clients
of OpenAI's API `{"error": {"message", "type", "param", "code"}}`; the path says which it is.
"""

import json
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from riftco.serving.http.request_policy import Refusal

_HEADERS = {
    "Cache-Control": "no-store",
    # as recorded from the original; the page, the only answer that a browser runs, has a stricter one
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_OPENAI_PATHS = ("/v1/models", "/v1/completions", "/v1/chat/")
_ERROR_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


def json_text(value: Any) -> bytes:
    """Compact JSON, non-ASCII as UTF-8. ValueError for what JSON cannot say, such as NaN."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate has no UTF-8: backslashreplace writes it as \udxxx, which is its JSON escape.
    return text.encode("utf-8", errors="backslashreplace")


def json_answer(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON object."""
    return Response(
        json_text(value), status, protective_headers() | (headers or {}), "application/json; charset=utf-8"
    )


def html_answer(page: bytes, policy: str) -> Response:
    """An HTML page under its own Content-Security-Policy."""
    headers = protective_headers() | {"Content-Security-Policy": policy}
    return Response(page, 200, headers, "text/html; charset=utf-8")


def refusal_answer(refusal: Refusal, path: str, *, close: bool = False) -> Response:
    """An error in the shape that clients of this path know; `close` ends the connection after it."""
    headers = {"Allow": refusal.allow} if refusal.allow else {}
    if refusal.retry_after is not None:
        headers["Retry-After"] = str(refusal.retry_after)
    elif refusal.status != HTTPStatus.REQUEST_TIMEOUT:
        headers["X-Should-Retry"] = "false"
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if close:
        headers["Connection"] = "close"
    return json_answer(error_value(refusal, path), refusal.status, headers)


def error_value(refusal: Refusal, path: str) -> dict[str, Any]:
    """The JSON of an error."""
    if not path.startswith(_OPENAI_PATHS):
        return {"error": refusal.status.phrase, "detail": refusal.detail}
    default = "server_error" if refusal.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(refusal.status, default)
    return {"error": {"message": refusal.detail, "type": kind, "param": refusal.param, "code": refusal.code}}


def protective_headers() -> dict[str, str]:
    """Headers of every answer, whatever it holds."""
    return dict(_HEADERS)
