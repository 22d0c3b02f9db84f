"""Small runs for several ranks, and ranks as forked processes, which need not import everything again."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from artifacts import ModelBundle, Workspace
from riftco.config import LoraConfig, PostTrainingConfig, PretrainingConfig
from riftco.data import InstructionExample
from riftco.training import TrainingMetric, post_train, pretrain_text
from tests.artifacts.children import Say, together
from tests.support import FIXTURES

STEPS = 6
TEXT = "".join(
    f"the {a} saw the {b}{' and ran' * length}.\n\n"
    for length, a in enumerate(("owl", "fox", "hen"))
    for b in ("cat", "dog", "hat", "sun")
)
EXAMPLES = [
    InstructionExample(f"Who saw the {a}?", f"The {b} did{' it' * length}.")
    for length, a in enumerate(("owl", "fox"))
    for b in ("hen", "cat")
]
SIZES = {"backend": "cpu", "steps": STEPS, "context_size": 12, "batch_size": 6, "checkpoint_minutes": 0.0}
LORA = {"fine_tuning_method": "lora", "lora": LoraConfig(rank=2)}
PRETRAINING = PretrainingConfig(
    **SIZES, sampling_strategy="document_rows", accumulation_steps=2, validation_batch_count=1
)
TUNING = PostTrainingConfig(**SIZES)

Sink = Callable[[TrainingMetric], None] | None


def pretrained(workspace: Workspace | None = None, sink: Sink = None, **settings: Any) -> Any:
    config = PRETRAINING.model_copy(update=settings)
    return pretrain_text(TEXT, config, workspace=workspace, metric_sink=sink)


def tuned(workspace: Workspace | None = None, sink: Sink = None, held_out: int = 0, **settings: Any) -> Any:
    base = ModelBundle.load(FIXTURES / "bpe.rift")
    config = TUNING.model_copy(update=settings)
    return post_train(
        base, EXAMPLES, config, validation=EXAMPLES[:held_out], workspace=workspace, metric_sink=sink
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """In a forked process the threads of its parent's pool are gone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def in_ranks(job: Callable[[Say], object], size: int = 2) -> list[list[Any]]:
    """What the job says in each of so many ranks, all of them processes."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]

    def of_rank(rank: int) -> Callable[[Say], object]:
        def run(say: Say) -> None:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
            job(say)

        return run

    said = together([of_rank(rank) for rank in range(size)])
    errors = [
        answer["error"]
        for answers in said
        for answer in answers
        if isinstance(answer, dict) and "error" in answer
    ]
    assert not errors, "\n".join(errors)
    return said
