"""Request bodies as JSON that means one thing only: no key twice, no NaN, no half of a character.

Nor may an object have more keys than any request has: each unknown one would be an error of its own.
"""

import json
import re
from collections import Counter
from typing import Any

_MOST_KEYS = 64
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request's body. ValueError (UnicodeError included) says what is wrong with it."""
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
        if _SURROGATE_ESCAPE.search(body):  # half of a pair is no character and has no UTF-8
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("request JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("request JSON must be an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MOST_KEYS:
        raise ValueError(f"request JSON has an object of {len(pairs)} keys, more than {_MOST_KEYS}")
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"request JSON has the key {twice[:64]!a} twice")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
