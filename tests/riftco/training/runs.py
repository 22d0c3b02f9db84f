"""Small runs of every kind, and all the bytes that a run is made of."""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from artifacts import ModelConfig
from riftco.config import LoraConfig
from riftco.model import Adam, DecoderOnlyTransformer, ModelOptimizer, next_token_loss
from riftco.training import ExampleWindowBatchSource
from riftco.training.adamw import AdamW
from riftco.training.muon import Muon

METHODS = ("full", "lora", "qlora")
OPTIMIZERS = ("adam", "paged adam", "adamw", "muon")
CONFIG = ModelConfig(
    vocabulary_size=13, maximum_context=5, model_width=8, head_count=2, block_count=2, feed_forward_width=10
)
LORA = LoraConfig(
    rank=2, alpha=3.0, targets=("attention.query", "feed_forward.expand", "language_model_head")
)
SEQUENCES = [[(7 * place + index) % 13 for place in range(9 + index)] for index in range(4)]


@dataclass
class Run:
    """A model, the optimiser that owns its trained parameters, and a source of batches."""

    model: DecoderOnlyTransformer
    optimizer: ModelOptimizer
    source: Any

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Take steps; the loss and the gradient norm of each."""
        metrics = []
        for _ in range(steps):
            batch = self.source.next_batch()
            loss = next_token_loss(self.model, batch.inputs, batch.targets, batch.mask)
            loss.backward()
            metrics.append((loss.item(), self.optimizer.step().gradient_norm))
        return metrics


def new_model(method: str, seed: int = 3, lora_seed: int = 6) -> DecoderOnlyTransformer:
    """A fresh model, packed and with adapters as the method wants it; B starts away from zero."""
    model = DecoderOnlyTransformer(replace(CONFIG, random_seed=seed))
    if method == "qlora":
        model.quantize_nf4(32, scale_block_size=32)
    if method != "full":
        model.attach_lora(LORA.model_copy(update={"random_seed": lora_seed}))
        with torch.no_grad():
            for number, parameter in enumerate(model.adapter_parameters().values()):
                parameter += 0.1 * torch.sin(torch.arange(parameter.numel()) + number + seed).view_as(
                    parameter
                )
    return model


def new_optimizer(name: str, model: DecoderOnlyTransformer) -> ModelOptimizer:
    """The optimiser of that name over what the model trains."""
    parameters = model.base_parameters() if model.lora is None else model.adapter_parameters()
    match name:
        case "adam":
            return Adam(parameters, 0.01)
        case "paged adam":
            return Adam(parameters, 0.01, state_storage="paged", page_size=7)
        case "adamw":
            return AdamW(parameters, 0.01, weight_decay=0.1)
        case _:
            return Muon(parameters, 0.01, matrix_learning_rate=0.02, weight_decay=0.1)


def new_run(method: str = "full", optimizer: str = "adam", seed: int = 3) -> Run:
    """A fresh run; runs of other seeds begin elsewhere with other weights and adapters."""
    model = new_model(method, seed, lora_seed=seed + 3)
    source = ExampleWindowBatchSource(SEQUENCES, batch_size=2, context_size=5, random_seed=seed)
    return Run(model, new_optimizer(optimizer, model), source)


def bytes_of(run: Run) -> dict[str, Any]:
    """All that a run consists of, by name."""
    state = run.optimizer.state()
    return {name: p.detach().numpy().tobytes() for name, p in run.model.named_parameters()} | {
        "packed": [weight.encode() for weight in run.model.packed_state()],
        "first moments": state.first_moments.tobytes(),
        "second moments": state.second_moments.tobytes(),
        "scalars": state.scalars,
        "rate": run.optimizer.learning_rate,
        "source": run.source.checkpoint_state(),
        "python": random.getstate(),
    }
