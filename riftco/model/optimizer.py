"""What every optimiser is beside its update rule: an owner of parameters with a life, locks and a state."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
import torch
from torch import Tensor, nn

from artifacts import OptimizerScalars, ParameterSpec
from artifacts.arrays import Floats
from riftco.model.activity import Activity, Kind

_STORAGE = ("state_storage", "page_size")  # options that may differ between a state and who loads it


@dataclass(frozen=True, slots=True)
class AdamStepStats:
    """What a step did: its number from 1, the gradient's L2 norm before clipping, and the factor applied."""

    step: int
    gradient_norm: float
    clip_scale: float


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """An optimiser between two steps: its scalars, and flat float32 arrays `[sum of counts]` on the CPU.

    Values and first moments are in the order of `parameters`; second moments too, without the parameters that
    have none (`scalars.with_second_moments`).
    """

    scalars: OptimizerScalars
    parameters: tuple[ParameterSpec, ...]
    values: Floats
    first_moments: Floats
    second_moments: Floats


class ModelOptimizer(ABC):
    """Optimises named float32 parameters in their given order; a context manager, not copyable.

    Built from a model's parameter list it counts among what relies on the model (`riftco.model.activity`)
    until it is closed or gone; once closed, every method raises RuntimeError. `learning_rate` is the rate of
    the next step: a schedule sets it, so it is no part of the state; `options` keeps the one built with.
    """

    learning_rate: float

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        if not parameters:
            raise ValueError(f"{type(self).__name__} needs at least one parameter")
        self.parameters = dict(parameters)
        self.step_count = 0
        self._closed = False
        self._activity: Activity | None = getattr(parameters, "activity", None)
        if self._activity is not None:
            self._activity.register("optimizer", self)

    def step(self) -> AdamStepStats:
        """One update from the current gradients, which it clears.

        ValueError, and nothing changed, when a gradient is missing, one or an updated value is not finite, or
        a decode session of the model is open.
        """
        with self._exclusively("take a step", "session"), torch.no_grad():
            stats = self._update(self._gradients())
            self.zero_gradients()
            return stats

    def zero_gradients(self) -> None:
        """Clear the gradients of all owned parameters."""
        self._require_open()
        for parameter in self.parameters.values():
            parameter.grad = None

    def owns_parameters_of(self, model: nn.Module) -> bool:
        """Whether all its parameters are this very model's, not equal ones of another."""
        self._require_open()
        own = {id(parameter) for parameter in model.parameters()}
        return all(id(parameter) in own for parameter in self.parameters.values())

    @property
    def device(self) -> torch.device:
        """Where the moments are."""
        self._require_open()
        return next(_all_pages(self._first())).device

    @property
    def state_storage(self) -> str:
        """Where moments lie: "contiguous", one tensor for each parameter, or "paged"."""
        return "contiguous"

    @property
    def state_page_count(self) -> int:
        """How many pages they lie in; 0 if contiguous."""
        return 0

    @property
    def state_payload_bytes(self) -> int:
        """Bytes of all moments."""
        return sum(page.nbytes for page in (*_all_pages(self._first()), *_all_pages(self._second())))

    def state(self) -> OptimizerState:
        """A copy of the values, moments and scalars.

        ValueError while a graph of the model is alive or gradients wait for a step.
        """
        with self._exclusively("capture the optimizer's state", "graph"):
            self.refuse_pending("capture the optimizer's state")
            values = [[parameter.detach()] for parameter in self.parameters.values()]
            arrays = (_flat(values), _flat(self._first()), _flat(self._second()))
            return OptimizerState(self._scalars(), self._specs(), *arrays)

    def load_state(self, state: OptimizerState) -> None:
        """Take over values, moments and scalars; the rate of the next step stays.

        ValueError, before any change, for a state of other parameters, settings (where and in what pages
        moments are stored may differ) or another optimiser, and while a graph or decode session of the model
        is alive or gradients wait for a step.
        """
        with self._exclusively("load an optimizer's state", "graph", "session"), torch.no_grad():
            self.refuse_pending("load an optimizer's state")
            self.require_own(state)
            _copy(state.values, [[parameter] for parameter in self.parameters.values()])
            _copy(state.first_moments, self._first())
            _copy(state.second_moments, self._second())
            self._set_scalars(state.scalars)

    def require_own(self, state: OptimizerState) -> None:
        """ValueError unless the state is one of this optimiser, these parameters and these settings."""
        self._require_open()
        own, name = self._scalars(), type(self).__name__
        if not isinstance(state, OptimizerState):
            raise TypeError(f"{name} loads an OptimizerState, got {type(state).__name__}")
        if state.scalars.name != own.name:
            raise ValueError(f"the state is of {state.scalars.name}, this is {own.name}; build that one")
        if difference := _first_difference(state.parameters, self._specs()):
            raise ValueError(f"the state's parameters are not those that {name} owns: {difference}")
        theirs = asdict(state.scalars.options)
        for option, value in asdict(own.options).items():
            if option not in _STORAGE and theirs[option] != value:
                raise ValueError(
                    f"the state was made with {option} {theirs[option]} and this {name} has {value}; "
                    "build it with the same"
                )
        all_counted = (state.parameters, state.parameters, own.with_second_moments(state.parameters))
        arrays = (state.values, state.first_moments, state.second_moments)
        for array, parameters in zip(arrays, all_counted, strict=True):
            count = sum(parameter.count for parameter in parameters)
            if array.dtype != np.float32 or array.shape != (count,):
                shown = f"{array.dtype} {list(array.shape)}"
                raise ValueError(f"the state needs float32 [{count}], got {shown}; capture it again")
            if not np.isfinite(array).all():
                raise ValueError("the state has values that are not finite; capture it again")
        if (state.second_moments < 0).any():
            raise ValueError("the state has second moments below 0; capture it again")

    def refuse_pending(self, operation: str) -> None:
        """ValueError "cannot <operation> while ..." from `backward` until a step or `zero_gradients`."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                raise ValueError(
                    f"cannot {operation} while gradients, that of {name} for one, wait for a step; take it, "
                    "or clear them with zero_gradients"
                )

    def close(self) -> None:
        """Let go of parameters and moments; harmless when repeated."""
        if not self._closed:
            self._closed = True
            if self._activity is not None:
                self._activity.release(self)
            self.parameters = {}
            self._drop()

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("an optimizer cannot be copied; capture its state and load that into another")

    @abstractmethod
    def _update(self, gradients: dict[str, Tensor]) -> AdamStepStats:
        """Take a step; ValueError, and nothing changed, if anything would not be finite."""

    @abstractmethod
    def _first(self) -> Sequence[Sequence[Tensor]]:
        """The first moments of each parameter, in one page or several."""

    @abstractmethod
    def _second(self) -> Sequence[Sequence[Tensor]]:
        """The second moments of each parameter that has some."""

    @abstractmethod
    def _scalars(self) -> OptimizerScalars:
        """Settings and counts as a checkpoint holds them."""

    @abstractmethod
    def _set_scalars(self, scalars: OptimizerScalars) -> None:
        """Take over the counts."""

    @abstractmethod
    def _drop(self) -> None:
        """Free the moments."""

    def _gradients(self) -> dict[str, Tensor]:
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if len(gradients) < len(self.parameters):
            missing = next(name for name in self.parameters if name not in gradients)
            raise ValueError(f"{missing} has no gradient; call backward before step")
        return gradients

    def _specs(self) -> tuple[ParameterSpec, ...]:
        return tuple(ParameterSpec(name, tuple(p.shape)) for name, p in self.parameters.items())

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"{type(self).__name__} is closed; build another")

    @contextmanager
    def _exclusively(self, operation: str, *kinds: Kind) -> Iterator[None]:
        self._require_open()
        if self._activity is None:
            yield
            return
        with self._activity.lock:
            self._activity.refuse(operation, *kinds)
            yield


def _all_pages(moments: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
    return (page for pages in moments for page in pages)


def _flat(moments: Sequence[Sequence[Tensor]]) -> Floats:
    pages = [page.flatten() for page in _all_pages(moments)]
    return torch.cat(pages).numpy(force=True) if pages else np.empty(0, np.float32)


def _copy(values: Floats, moments: Sequence[Sequence[Tensor]]) -> None:
    at = 0
    for page in _all_pages(moments):
        page.copy_(torch.tensor(values[at : at + page.numel()]).view(page.shape))
        at += page.numel()


def _first_difference(theirs: Sequence[ParameterSpec], own: Sequence[ParameterSpec]) -> str:
    """Where two lists of parameters part, in words; empty if they do not."""
    for index in range(max(len(theirs), len(own))):
        left, right = (specs[index] if index < len(specs) else None for specs in (theirs, own))
        if left != right:
            return f"{_shown(left)} against {_shown(right)}"
    return ""


def _shown(spec: ParameterSpec | None) -> str:
    return "none" if spec is None else f"{spec.name} {list(spec.shape)}"
