"""The answers of the HTTP service: compact JSON or the chat page, each with the same protective headers."""

import json
from typing import Any

from starlette.responses import Response

from riftco.serving.request_policy import Refusal

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def json_answer(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON object, compact, non-ASCII as UTF-8."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate has no UTF-8: backslashreplace writes it as \udxxx, which is its JSON escape.
    body = text.encode("utf-8", errors="backslashreplace")
    return Response(body, status, _HEADERS | (headers or {}), "application/json; charset=utf-8")


def html_answer(page: bytes) -> Response:
    """An HTML page."""
    return Response(page, 200, _HEADERS, "text/html; charset=utf-8")


def refusal_answer(refusal: Refusal, *, close: bool = False) -> Response:
    """An error as `{"error": reason phrase, "detail": message}`; `close` ends the connection after it."""
    headers = {"Allow": refusal.allow} if refusal.allow else {}
    if close:
        headers["Connection"] = "close"
    value = {"error": refusal.status.phrase, "detail": refusal.detail}
    return json_answer(value, refusal.status, headers)
