"""Planting a bug: a method runs the code that it has in its module's changed source."""

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType


@contextmanager
def planted(owner: type, method: str, right: str, wrong: str, folder: Path) -> Iterator[None]:
    """A class with a piece of a method's code exchanged; AssertionError unless it occurs exactly once."""
    function = _function(owner, method)
    body = inspect.getsource(function)
    times = body.count(right)
    assert times == 1, f"{owner.__name__}.{method} has {right!r} {times} times: correct the bug"
    source = inspect.getsource(sys.modules[owner.__module__])
    path = folder / "changed.py"
    path.write_text(source.replace(body, body.replace(right, wrong)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    other, code = _function(getattr(changed, owner.__name__), method), function.__code__
    function.__code__ = other.__code__
    try:
        yield
    finally:
        function.__code__ = code


def _function(owner: type, method: str) -> FunctionType:
    attribute = inspect.getattr_static(owner, method)
    return attribute.fget if isinstance(attribute, property) else inspect.unwrap(attribute)
