"""Settings of serving."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from riftco.config.fields import BackendChoice, Config, Flag, NonNegativeInt, PositiveFloat, PositiveInt


class ServingConfig(Config):
    """How a bundle is served."""

    backend: BackendChoice = "auto"
    maximum_new_tokens: PositiveInt = 256
    maximum_request_bytes: PositiveInt = 1_048_576
    kv_cache: Literal["paged", "contiguous"] = "paged"
    kv_cache_block_size: PositiveInt = 16

    # extension
    mode: Literal["deterministic", "fast"] = "deterministic"
    """`deterministic`: the same bits of every answer under any load. `fast` drops what that may cost, which
    with the native kernels is nothing."""
    weights: Literal["float32", "bfloat16", "int8", "nf4"] = "float32"
    """What linear weights are stored as while served: rounded to bfloat16, or quantized to 8 or 4 bits. Keys
    and values are bfloat16 beside any of these."""
    maximum_running: PositiveInt = 32
    """Sequences computed together."""
    maximum_waiting: NonNegativeInt = 256
    """Sequences queued beyond those; more are refused with 429."""
    step_tokens: PositiveInt = 256
    """Tokens computed in one step: prompts longer than this are computed in chunks."""
    kv_cache_block_count: NonNegativeInt = 0
    """Pages of keys and values; 0 for `maximum_running` full contexts. With fewer, sequences take turns."""
    prefix_cache: Flag = True
    """Reuse the pages of beginnings that prompts have in common."""
    threads: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = None
    """Threads of a step in the native kernels; all cores by default."""
    request_seconds: PositiveFloat | None = None
    """Deadline of every request."""
    stall_seconds: Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)] = 3.0
    """After how long without a step the service calls itself stalled; idle, it turns twice a second."""

    @model_validator(mode="after")
    def _steps_advance_everybody(self) -> "ServingConfig":
        if self.step_tokens < self.maximum_running:
            raise ValueError(
                f"step_tokens {self.step_tokens} cannot advance maximum_running {self.maximum_running} "
                "sequences; raise the one or lower the other"
            )
        return self
