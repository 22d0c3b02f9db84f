"""Where a model runs: the names of the backends, which of them this machine has, and the order of `auto`."""

from importlib.util import find_spec
from typing import Literal

import torch

from riftco.config import BackendChoice
from riftco.errors import BackendUnavailableError

BackendName = Literal["cpu", "metal", "cuda", "tpu"]
AUTO_ORDER: tuple[BackendName, ...] = ("tpu", "cuda", "metal", "cpu")
_DEVICE: dict[BackendName, str] = {"cpu": "cpu", "metal": "mps", "cuda": "cuda", "tpu": "xla"}
_NAME: dict[str, BackendName] = {device: name for name, device in _DEVICE.items()}


def backend_available(name: BackendName) -> bool:
    """Whether this machine can run the backend now."""
    match name:
        case "cpu":
            return True
        case "cuda":
            return torch.cuda.is_available()
        case "metal":
            return torch.backends.mps.is_available()
        case "tpu":
            return find_spec("torch_xla") is not None
        case _:
            raise ValueError(f"unknown backend {name!r}; choose one of {', '.join(_DEVICE)}")


def resolve_backend(choice: BackendChoice) -> BackendName:
    """The backend a choice stands for; BackendUnavailableError when it is named and absent: no fallback."""
    if choice == "auto":
        return next(name for name in AUTO_ORDER if backend_available(name))
    if not backend_available(choice):
        raise BackendUnavailableError(f"{choice.capitalize()} was requested but is unavailable")
    return choice


def torch_device(name: BackendName) -> torch.device:
    """The torch device of a backend."""
    return torch.device(_DEVICE[name])


def backend_of(device: torch.device) -> BackendName:
    """The backend a torch device belongs to."""
    return _NAME[device.type]
