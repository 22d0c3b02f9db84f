"""The key of a step: a digest of how a result is made, equal when the step would do the same again."""

import hashlib
import math
from typing import Any

from artifacts.canonical_json import canonical_json


def step_key(step: str, version: int, recipe: Any) -> str:
    """SHA-256 (64 hex digits) of the step's name, its version, and the recipe: settings and input digests.

    Raises TypeError naming the place of any value without one stable spelling: sets, NaN, paths, bytes,
    functions, keys that are not texts, and subclasses, whose meaning their JSON may not show.
    """
    _require_stable(recipe, "recipe")
    content = {"step": step, "version": version, "recipe": recipe}
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _require_stable(value: Any, where: str) -> None:
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r}: only texts are stable keys")
            _require_stable(item, f"{where}.{key}")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _require_stable(item, f"{where}[{index}]")
    elif type(value) is float:
        if not math.isfinite(value):
            raise TypeError(f"{where} is {value}: only finite numbers are stable")
    elif type(value) not in (str, int, bool, type(None)):
        raise TypeError(f"{where} is a {type(value).__name__}: turn it into plain JSON or a digest first")
