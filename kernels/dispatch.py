"""Which implementation of an operation runs: compiled C++ on CPUs, Triton on GPUs, plain torch anywhere.

An implementation may return NotImplemented for arguments that it does not cover; the next one is asked then,
and torch's, which defines the operation, covers them all.
"""

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal

import torch

Name = Literal["native", "triton", "torch"]

_forced: contextvars.ContextVar[Name | None] = contextvars.ContextVar("forced", default=None)
_operations: dict[str, "Operation"] = {}


class Operation:
    """One operation and its implementations, called like a function; argument one decides the device."""

    def __init__(self, name: str, **implementations: Callable[..., Any] | None) -> None:
        """`torch` must be there; `native` and `triton` may be missing or None."""
        self.name = name
        self.implementations = {key: call for key, call in implementations.items() if call is not None}
        self._orders: dict[tuple[str, Name | None], list[str]] = {}
        _operations[name] = self

    def order(self, device: torch.device) -> list[str]:
        """Implementations to ask for a tensor on a device, first to last."""
        key = device.type, _forced.get()
        if key not in self._orders:  # made once: a small operation takes microseconds
            self._orders[key] = self._order(*key)
        return self._orders[key]

    def _order(self, kind: str, forced: Name | None) -> list[str]:
        preferred = [forced] if forced else {"cpu": ["native"], "cuda": ["triton"]}.get(kind, [])
        return [name for name in dict.fromkeys([*preferred, "torch"]) if name in self.implementations]

    def __call__(self, first: torch.Tensor, *arguments: Any) -> Any:
        for name in self.order(first.device):
            result = self.implementations[name](first, *arguments)
            if result is not NotImplemented:
                return result
        raise AssertionError(f"{self.name}: torch's implementation must cover everything")


@contextmanager
def use(name: Name) -> Iterator[None]:
    """Prefer an implementation whatever the device: "torch", or "triton" under an interpreter, for tests."""
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def explain() -> dict[str, dict[str, str]]:
    """For each operation, which implementation is asked first on each kind of device.

    "unavailable" stands for a kind that this machine lacks. Metal ("mps") and TPUs ("xla") run torch's.
    """
    present = {kind: _is_there(kind) for kind in ("cpu", "cuda", "mps", "xla")}
    return {
        name: {
            kind: operation.order(torch.device(kind))[0] if there else "unavailable"
            for kind, there in present.items()
        }
        for name, operation in sorted(_operations.items())
    }


def _is_there(kind: str) -> bool:
    if kind == "xla":
        return find_spec("torch_xla") is not None
    return kind == "cpu" or bool(getattr(torch, kind).is_available())
