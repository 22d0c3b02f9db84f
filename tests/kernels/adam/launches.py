"""The launches that `kernels.adam` makes on a GPU, on meta tensors."""

from collections.abc import Callable

import torch

from kernels.adam.triton_adam import Arrays


def arrays() -> Arrays:
    tensors = [torch.empty(5000, device="meta") for _ in range(4)]
    return Arrays(*([tensor] for tensor in tensors), [1])


LAUNCHES: dict[str, Callable[[], object]] = {
    "measure": lambda: arrays().launch_measure(),
    "check": lambda: arrays().launch_update((0.0,) * 7, write=False),
    "update": lambda: arrays().launch_update((0.0,) * 7, write=True),
}
