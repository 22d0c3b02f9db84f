"""The launches of the wrapper, for compilation on machines without a GPU."""

from collections.abc import Callable

import torch

from kernels.sampling.reference import SETTINGS
from kernels.sampling.triton_sample import sample


def _launch(dtype: torch.dtype, *, penalties: bool) -> Callable[[], None]:
    def launch() -> None:
        logits = torch.empty(4, 4099, dtype=dtype, device="meta")
        counts = torch.empty(4, 4099, dtype=torch.int64, device="meta") if penalties else None
        settings = torch.ones(4, len(SETTINGS), dtype=torch.float64)
        sample(
            logits,
            torch.zeros(4, dtype=torch.float64),
            torch.ones(4, dtype=torch.int64),
            settings,
            counts,
            None,
        )

    return launch


LAUNCHES: dict[str, Callable[[], None]] = {
    "float32": _launch(torch.float32, penalties=False),
    "bfloat16 with penalties": _launch(torch.bfloat16, penalties=True),
}
