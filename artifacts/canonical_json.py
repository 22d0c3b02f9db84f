"""Canonical JSON: the one spelling of a JSON value that ids, manifests and step keys are computed over.

UTF-8, no spaces, keys sorted by code point, shortest round-trip floats, `1` distinct from `1.0`. Two values
with the same bytes are the same value, so a digest of the bytes identifies the content.
"""

import json
import math
from typing import Any, NoReturn

from artifacts.errors import ArtifactError


def canonical_json(value: Any) -> bytes:
    """The canonical UTF-8 bytes of a JSON value (tuples count as arrays, scalar keys become strings).

    Raises TypeError for whatever has no such bytes: NaN, infinities, sets, bytes, lone surrogates, cycles.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
        return text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"value has no canonical JSON: {error}") from error


def parse_json(data: bytes, *, what: str) -> Any:
    """The value of strict UTF-8 JSON; `what` names the source in messages.

    Raises ArtifactError (code "json") for a byte order mark, invalid UTF-8, duplicate keys, NaN, infinities,
    numbers too large for binary64, lone surrogates, integers of more than 4,300 digits and absurd nesting.
    """
    try:
        text = str(data, "utf-8")
        value = json.loads(
            text, object_pairs_hook=_unique_keys, parse_float=_finite_float, parse_constant=_refuse_constant
        )
        if r"\u" in text:  # only an escape can spell a lone surrogate
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ArtifactError("json", f"{what} is not strict JSON: {error}") from error
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {duplicate!r} occurs twice in one object")
    return value


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:32]} is too large for a 64-bit float")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
