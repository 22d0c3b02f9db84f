"""What a run is and does, seen where it trains: its pace, its memory, its samples.

Whoever tells of the run may be in another process (`riftco.training.rank_events`), where none of this can be
seen any more.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from riftco.config import PostTrainingConfig, PretrainingConfig
from riftco.log import LOGGER
from riftco.model import DecoderOnlyTransformer
from riftco.tokenizer import Tokenizer
from riftco.training.metrics import TrainingMetric
from riftco.training.tracking.pace import PaceMeter, flops_per_token, matrix_limit, peak_memory_bytes
from riftco.training.tracking.samples import Sampler, text_sampler

Measured = Mapping[str, float | None]
"""Columns of the table by name: what the moment of a metric says."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known of a run once its model and data are there."""

    device: torch.device
    flops_per_token: float
    matrix_limit: float
    """FLOP/s of all that the run has: of this process's share of the machine, times the processes."""
    bytes_per_token: float | None
    """Of the text that is learned; None gives no bits per byte."""
    sampler: Sampler | None


def run_facts(
    model: DecoderOnlyTransformer,
    tokenizer: Tokenizer,
    config: PretrainingConfig | PostTrainingConfig,
    *,
    device: torch.device,
    bytes_per_token: float | None,
) -> RunFacts:
    """The facts of a run that is about to begin; measures the device for about 0.2 s a precision.

    `device` is where the run computes; the model may lie elsewhere meanwhile, as one does that is sharded.
    """
    # Where its precision is no faster than float32, a run is still held against what the machine can do.
    dtypes = dict.fromkeys((torch.float32, _DTYPES[config.precision]))
    limits = {dtype: matrix_limit(device, dtype) for dtype in dtypes}
    if limits.get(torch.int8, math.inf) < limits[torch.float32]:
        LOGGER.warning(
            "products of 8 bits reach %.0f GFLOP/s here, those of float32 %.0f: another precision is faster",
            limits[torch.int8] / 1e9,
            limits[torch.float32] / 1e9,
        )
    adapters = model.adapter_parameters().values() if model.lora else ()
    return RunFacts(
        device=device,
        flops_per_token=flops_per_token(
            model.config, config.context_size, sum(parameter.numel() for parameter in adapters)
        ),
        # Metrics count the tokens of all ranks, and each rank has threads or a GPU like this one's.
        matrix_limit=config.processes * max(limits.values()),
        bytes_per_token=bytes_per_token,
        sampler=text_sampler(model, tokenizer, config.sample_prompt) if config.sample_steps else None,
    )


def beginning(
    sink: object,
    model: DecoderOnlyTransformer,
    tokenizer: Tokenizer,
    config: PretrainingConfig | PostTrainingConfig,
    *,
    bytes_per_token: float | None = None,
) -> Callable[[Sequence[TrainingMetric]], None] | None:
    """What tells a metric sink of this run that it begins, after some metrics, if it is a `RunWatch`.

    To be asked for while the model is still on the device that it is trained on.
    """
    if not isinstance(sink, RunWatch):
        return None
    device = model.device
    return lambda earlier: sink.begin(
        run_facts(model, tokenizer, config, device=device, bytes_per_token=bytes_per_token), earlier
    )


class RunWatch(ABC):
    """A metric sink that measures, and hands on what it sees with the moment (seconds since 1970)."""

    def __init__(self, sample_steps: int) -> None:
        """A sample every so many steps; 0 takes none."""
        self._sample_steps = sample_steps
        self._facts: RunFacts | None = None
        self._start = time.monotonic()
        self._meter = PaceMeter()

    def begin(self, facts: RunFacts, earlier: Sequence[TrainingMetric] = ()) -> None:
        """Before the first metric: what the run is and, if it goes on, its metrics so far, in order."""
        self._facts = facts
        self.began(facts.bytes_per_token, earlier)
        LOGGER.info("matrix products reach %.0f GFLOP/s here", facts.matrix_limit / 1e9)

    def __call__(self, metric: TrainingMetric) -> None:
        """Take a metric as it happens."""
        self.happened(metric, self._measured(metric), time.time())
        if metric.phase == "train" and self._sample_steps and metric.step % self._sample_steps == 0:
            self._sample(metric.step)
        self._meter.resume()

    @abstractmethod
    def began(self, bytes_per_token: float | None, earlier: Sequence[TrainingMetric]) -> None:
        """The run begins, after these metrics."""

    @abstractmethod
    def happened(self, metric: TrainingMetric, measured: Measured, moment: float) -> None:
        """A metric came. What this raises ends the run between two steps."""

    @abstractmethod
    def wrote(self, step: int, text: str, moment: float) -> None:
        """The model went on with the prompt like this."""

    def _measured(self, metric: TrainingMetric) -> dict[str, float | None]:
        measured: dict[str, float | None] = {"elapsed_seconds": time.monotonic() - self._start}
        if metric.phase == "train":
            device = self._facts.device if self._facts else torch.device("cpu")
            pace = self._meter.step(metric.token_count)
            measured |= {"tokens_per_second": pace, "peak_memory_bytes": peak_memory_bytes(device)}
            if self._facts and pace is not None:
                reached = pace * self._facts.flops_per_token
                measured["matrix_fraction"] = reached / self._facts.matrix_limit
        return measured

    def _sample(self, step: int) -> None:
        """Take a sample. A model that gives none does not end the run."""
        if self._facts is None or self._facts.sampler is None:
            return
        try:
            text = self._facts.sampler(step)
        except (ValueError, RuntimeError, OSError) as error:
            LOGGER.warning("no sample at step %d: %s", step, error)
        else:
            self.wrote(step, text, time.time())
