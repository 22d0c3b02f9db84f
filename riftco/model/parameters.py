"""A list of a model's parameters by name, which counts among what relies on the model while it is alive."""

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, Self

import torch
from torch import Tensor, nn

from riftco.model.activity import Activity

if TYPE_CHECKING:
    from riftco.model.live_model import LiveModel


class ParameterList(Mapping[str, nn.Parameter]):
    """Parameters in the model's order; a context manager, not copyable. RuntimeError if used once closed."""

    def __init__(
        self,
        model: "LiveModel",
        kind: Literal["base list", "adapter list"],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self._model: LiveModel | None = model
        self._parameters = dict(parameters)
        model.activity.register(kind, self)

    @property
    def model(self) -> "LiveModel":
        """The very model whose parameters these are."""
        if self._model is None:
            raise RuntimeError("the parameter list is closed")
        return self._model

    @property
    def activity(self) -> Activity:
        """Of the model: where an optimiser of these parameters registers."""
        return self.model.activity

    @property
    def closed(self) -> bool:
        return self._model is None

    def close(self) -> None:
        """Let go of the parameters; harmless when repeated."""
        if self._model is not None:
            self._model.activity.release(self)
            self._model = None
            self._parameters.clear()

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._open()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open())

    def __len__(self) -> int:
        return len(self._open())

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a parameter list cannot be copied; ask the model for another")

    def _open(self) -> dict[str, nn.Parameter]:
        if self._model is None:
            raise RuntimeError("the parameter list is closed")
        return self._parameters


@torch.no_grad()
def copy_values(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    """Copy every tensor into the parameter of its name.

    ValueError, before any change, unless names, order and shapes are the same and all values finite.
    """
    if list(parameters) != list(tensors):
        raise ValueError("artifact parameter names do not match model")
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise ValueError(f"artifact parameter shapes do not match model: {name}")
        if not bool(tensors[name].to(parameter.dtype).isfinite().all()):
            raise ValueError(f"{name} has values that are not finite")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
