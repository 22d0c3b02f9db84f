"""Importing a module of ours anew, against other libraries than the installed ones."""

import sys
from types import ModuleType

import pytest


def forget(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """The next import of this tracking module runs it again; after the test, all is as it was before."""
    name = f"riftco.training.tracking.{module}"
    monkeypatch.setitem(sys.modules, name, ModuleType("a place to restore"))
    del sys.modules[name]
