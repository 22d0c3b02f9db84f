"""What relies on a live model now, so that nothing is changed under it: the locks of the contract.

Graphs, optimizers, parameter lists and decode sessions count while they are alive, and are held weakly: what
is closed or no longer referenced stops counting at once. An operation names the kinds that it cannot bear:

| operation | graph | optimizer | base list | adapter list | session |
| --- | --- | --- | --- | --- | --- |
| move to another backend | refused | refused | ok | ok | refused |
| load parameter values | refused | refused | ok | ok | refused |
| load frozen base values, below adapters | refused | only the adapters' own | ok | ok | refused |
| attach LoRA | refused | refused | ok | ok | refused |
| quantize to NF4 | refused | refused | refused | refused | refused |
| load packed state | refused | ok | ok | ok | refused |
| merge LoRA | refused | refused | ok | refused | refused |
| optimizer step | ok, and makes it stale | ok | ok | ok | refused |
| capture an optimizer's state | refused | ok | ok | ok | ok |
| load an optimizer's state | refused | ok | ok | ok | refused |

The last two are refused, too, while the optimizer's gradients wait for a step, even if they are zero.
All else is free: forward, zero_gradients, new optimizers, lists and sessions, the two run-time policies.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["graph", "optimizer", "base list", "adapter list", "session"]

_OBSTACLES: dict[Kind, str] = {
    "graph": "a graph of the model is alive; let go of outputs and losses, or compute them under no_grad",
    "optimizer": "an optimizer is alive; close it first",
    "base list": "a list of its base parameters is alive; close it first",
    "adapter list": "a list of its adapter parameters is alive; close it first",
    "session": "a decode session is open; close it first",
}
_TOKEN = "riftco.activity"


class _Graph:
    """Lives exactly as long as the node of the autograd graph that holds it."""


class Activity:
    """The living dependants of one model, and the re-entrant lock under which it changes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._holders: dict[Kind, weakref.WeakValueDictionary[int, object]] = {
            kind: weakref.WeakValueDictionary() for kind in _OBSTACLES
        }

    def register(self, kind: Kind, holder: object) -> None:
        """Count a holder, weakly, until it is released or gone."""
        with self.lock:  # none comes in the middle of an operation that has looked whether there is one
            self._holders[kind][id(holder)] = holder

    def release(self, holder: object) -> None:
        """Count a holder no longer; harmless when repeated."""
        for holders in self._holders.values():
            holders.pop(id(holder), None)

    def holders(self, kind: Kind) -> list[object]:
        """Those that are alive."""
        return list(self._holders[kind].values())

    def watched(self, output: Tensor) -> Tensor:
        """The output; what computed it counts as a graph for as long as anything can differentiate it.

        A node's metadata is a dict that dies with it. A compiled region cannot look, and counts nothing.
        """
        if not torch.compiler.is_compiling() and (node := output.grad_fn) is not None:
            token = _Graph()
            node.metadata[_TOKEN] = token  # type: ignore[index]  # a property, typed as a method
            self.register("graph", token)
        return output

    def refuse(self, operation: str, *kinds: Kind) -> None:
        """ValueError "cannot <operation> while ..." if anything of these kinds is alive."""
        for kind in kinds:
            if len(self._holders[kind]):
                raise ValueError(f"cannot {operation} while {_OBSTACLES[kind]}")

    def only_optimizer_is_of(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether exactly one optimizer is alive and it owns exactly these parameters."""
        owned = [{id(p) for p in vars(holder)["parameters"].values()} for holder in self.holders("optimizer")]
        return owned == [{id(parameter) for parameter in parameters}]
