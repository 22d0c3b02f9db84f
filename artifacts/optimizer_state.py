"""The scalars of an optimizer in a checkpoint: its settings, its step, and what else it counts.

Plain values without behaviour, the `optimizer` object of a manifest. Which parameters have a second moment is
a rule of the format, so that no file has to list them and no reader has to believe it.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from artifacts.checks import positive_float32, require_choice, require_integer, require_keys
from artifacts.errors import ArtifactError
from artifacts.specs import ParameterSpec

_SMALLEST_NORMAL = 2.0**-1022
_MOST_STEPS = 2**64 - 1


@dataclass(frozen=True, slots=True)
class AdamOptions:
    """Settings of Adam; the first five are rounded to float32."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    maximum_gradient_norm: float = 1.0
    state_storage: str = "contiguous"
    page_size: int = 4096

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for settings that Adam refuses."""
        for name in ("learning_rate", "beta1", "beta2", "epsilon", "maximum_gradient_norm"):
            object.__setattr__(self, name, positive_float32(name, getattr(self, name)))
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be below 1 as float32, got {getattr(self, name)}")
        require_choice("state_storage", self.state_storage, ("contiguous", "paged"))
        require_integer("page_size", self.page_size, 1, 2**64 - 1)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The settings in a manifest; TypeError or ValueError unless they are some."""
        require_keys("optimizer options", value, {field.name for field in fields(cls)})
        return cls(**value)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWOptions:
    """Settings of AdamW, kept as they are (float64)."""

    learning_rate: float
    weight_decay: float
    beta1: float = 0.9
    beta2: float = 0.95  # usual for language models: 0.999 remembers longer than a short run lasts
    epsilon: float = 1e-8
    maximum_gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for settings that AdamW refuses."""
        for name in ("learning_rate", "epsilon", "maximum_gradient_norm"):
            object.__setattr__(self, name, _above_zero(name, getattr(self, name)))
        for name in ("beta1", "beta2"):
            object.__setattr__(self, name, _open_fraction(name, getattr(self, name)))
        decay = self.weight_decay
        if type(decay) not in (int, float) or decay != 0:
            decay = _above_zero("weight_decay", decay)
        object.__setattr__(self, "weight_decay", abs(float(decay)))  # zero has one spelling

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The settings in a manifest; TypeError or ValueError unless they are some."""
        require_keys("optimizer options", value, {field.name for field in fields(cls)})
        return cls(**value)


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonOptions(AdamWOptions):
    """Settings of Muon: its own for the blocks' matrices, and those of AdamW for the rest."""

    matrix_learning_rate: float
    momentum: float = 0.95

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for settings that Muon refuses."""
        AdamWOptions.__post_init__(self)
        rate = _above_zero("matrix_learning_rate", self.matrix_learning_rate)
        object.__setattr__(self, "matrix_learning_rate", rate)
        object.__setattr__(self, "momentum", _open_fraction("momentum", self.momentum))


@dataclass(frozen=True, slots=True)
class AdamState:
    """Adam's settings and scalars after `step_count` steps; the powers are running products of the betas."""

    options: AdamOptions
    step_count: int
    beta1_power: float
    beta2_power: float

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless the powers belong to the step.

        A power may differ from beta ** step by a relative 1e-12, the rounding of a running product; once that
        is below the smallest normal number, by anything below it.
        """
        if not isinstance(self.options, AdamOptions):
            raise TypeError(f"options must be AdamOptions, got {self.options!r}")
        require_integer("step_count", self.step_count, 0, _MOST_STEPS)
        for name, beta in (("beta1_power", self.options.beta1), ("beta2_power", self.options.beta2)):
            power, expected = getattr(self, name), beta**self.step_count
            if type(power) is not float:
                raise TypeError(f"{name} must be a float, got {power!r}")
            if expected <= _SMALLEST_NORMAL:
                fits = 0 <= power <= _SMALLEST_NORMAL
            else:
                fits = abs(power - expected) <= 1e-12 * expected
            if not fits:
                raise ValueError(
                    f"{name} must be {beta} ** {self.step_count} = {expected} but for rounding, got {power}"
                )

    @property
    def name(self) -> str:
        """What the optimizer is called in a manifest."""
        return "adam"

    def with_second_moments(self, trained: Iterable[ParameterSpec]) -> tuple[ParameterSpec, ...]:
        """Those of the trained parameters that have a second moment: all."""
        return tuple(trained)


@dataclass(frozen=True, slots=True)
class StepState:
    """Settings and step count of AdamW or Muon, which need no other scalars."""

    options: AdamWOptions
    step_count: int

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a state that neither can be in."""
        if not isinstance(self.options, AdamWOptions):
            raise TypeError(f"options must be AdamWOptions or MuonOptions, got {self.options!r}")
        require_integer("step_count", self.step_count, 0, _MOST_STEPS)

    @property
    def name(self) -> str:
        """What the optimizer is called in a manifest."""
        return "muon" if isinstance(self.options, MuonOptions) else "adamw"

    def with_second_moments(self, trained: Iterable[ParameterSpec]) -> tuple[ParameterSpec, ...]:
        """Those of the trained parameters that have a second moment; Muon's matrices have none."""
        if self.name == "adamw":
            return tuple(trained)
        return tuple(spec for spec in trained if not is_muon_matrix(spec.name, len(spec.shape)))


OptimizerScalars = AdamState | StepState


def is_muon_matrix(name: str, dimensions: int) -> bool:
    """Whether Muon moves the parameter itself: a matrix of a block, but no adapter. AdamW moves the rest."""
    return dimensions == 2 and name.startswith("blocks.") and ".lora_" not in name


def scalars_json(scalars: OptimizerScalars) -> dict[str, Any]:
    """The keys of a manifest's `optimizer` object that the scalars are spelled in."""
    return {"type": scalars.name} | asdict(scalars)


def scalars_from_json(value: Any, names: tuple[str, ...], other_keys: set[str]) -> OptimizerScalars:
    """The scalars in a manifest's `optimizer` object, which has other keys besides.

    ArtifactError, TypeError or ValueError unless they are those of one of the optimizers named.
    """
    if not isinstance(value, dict):
        raise TypeError(f"optimizer must be an object, got {type(value).__name__}")
    name = value.get("type")
    if name not in names:
        raise ArtifactError("optimizer", f"optimizer type must be {' or '.join(names)} here, got {name!r}")
    kind: type[OptimizerScalars] = AdamState if name == "adam" else StepState
    names_of_scalars = {field.name for field in fields(kind)}
    require_keys("optimizer", value, names_of_scalars | {"type"} | other_keys)
    options = _OPTIONS[name].from_json(value["options"])
    return kind(**{key: value[key] for key in names_of_scalars} | {"options": options})


_OPTIONS: dict[Any, type[AdamOptions | AdamWOptions]] = {
    "adam": AdamOptions,
    "adamw": AdamWOptions,
    "muon": MuonOptions,
}


def _above_zero(what: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{what} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{what} must be finite and above 0, got {value!r}")
    return number


def _open_fraction(what: str, value: Any) -> float:
    number = _above_zero(what, value)
    if number >= 1:
        raise ValueError(f"{what} must be below 1, got {value!r}")
    return number
