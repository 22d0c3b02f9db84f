"""Settings of pretraining and post-training.

The fields of the original's contract come first and keep its defaults; ours follow under `extension`
comments. `contract_dump` leaves an extension out of the metadata while it has its default, so a run that
uses none of them writes exactly the metadata the original would.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from artifacts.checks import positive_float32
from riftco.config.fields import (
    BackendChoice,
    Config,
    Flag,
    NonNegativeFloat,
    NonNegativeInt,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    Seed,
    Seed32,
)

AttentionKind = Literal["materialized", "flash"]
ActivationCheckpointing = Literal["disabled", "block"]
LossScope = Literal["full_sequence", "response_only"]
Nf4BlockSize = Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]
LoraTarget = Literal[
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.output",
    "feed_forward.expand",
    "feed_forward.project",
    "language_model_head",
]
LORA_TARGETS: tuple[LoraTarget, ...] = LoraTarget.__args__  # type: ignore[attr-defined]


class LoraConfig(Config):
    """Low-rank adapters (Hu et al. 2021): W x + (alpha / rank) B A x on the selected projections."""

    rank: PositiveInt = 4
    alpha: PositiveFloat = 8.0
    """Rounded to float32, which alpha / rank has to be too."""
    targets: tuple[LoraTarget, ...] = ("attention.query", "attention.value")
    """Projections that get an adapter; stored in the model's own order."""
    random_seed: Seed32 = 5489

    @field_validator("alpha")
    @classmethod
    def _float32(cls, alpha: float) -> float:
        return positive_float32("lora alpha", alpha)

    @field_validator("targets")
    @classmethod
    def _canonical_order(cls, targets: tuple[LoraTarget, ...]) -> tuple[LoraTarget, ...]:
        if not targets or len(set(targets)) != len(targets):
            raise ValueError(f"lora targets must be distinct and at least one, got {targets}")
        return tuple(target for target in LORA_TARGETS if target in targets)

    @model_validator(mode="after")
    def _float32_scale(self) -> Self:
        positive_float32("lora alpha / rank", self.alpha / self.rank)
        return self


class OptimizationConfig(Config):
    """What pretraining and post-training share beyond the original's contract."""

    # extension
    optimizer: Literal["adam", "adamw", "muon"] = "adam"
    """`adam` is the contract's; `adamw` decouples weight decay (Loshchilov & Hutter 2017); `muon` is Muon
    (Jordan et al. 2024) for the blocks' matrices and AdamW for the rest."""
    matrix_learning_rate: PositiveFloat = 0.02
    """Muon's peak rate for the blocks' matrices; `learning_rate` is that of the rest."""
    weight_decay: NonNegativeFloat = 0.1
    """Decay of matrices (never of biases, norms and embeddings) per unit of learning rate; with muon of the
    blocks' alone, with adam of none."""
    schedule: Literal["constant", "cosine", "trapezoid"] = "constant"
    """After the warm-up `cosine` falls from the peak to zero; `trapezoid` stays there until the cool-down."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to its peak."""
    cooldown_fraction: OpenFraction = 0.2
    """Share of the steps over which a trapezoid falls linearly to zero."""
    accumulation_steps: PositiveInt = 1
    """Batches whose gradients make one optimiser step; every trained token counts the same."""
    precision: Literal["fp32", "bf16", "int8"] = "fp32"
    """`bf16`: matrix products in bfloat16, or in 16-bit fixed point on CPUs with AVX2 and no matrix units.
    `int8`: in 8 bits with a scale for each 64 numbers, fastest on CPUs with AVX-512 VNNI. Weights,
    optimiser state, statistics and loss stay float32."""
    compile: Flag = False
    """Compile the blocks with `torch.compile`: up to a minute at the start; its gain varies by device."""
    nonfinite: Literal["raise", "skip"] = "raise"
    """When a loss or gradient is not finite, nothing is updated: end the run, or say so and go on."""
    processes: PositiveInt = 1
    """Ranks that share each batch, and of which `batch_size` is a multiple; started on this machine, or by
    torchrun on several."""
    sharding: Literal["none", "full"] = "none"
    """`full`: each rank holds a part of weights, gradients and optimiser state (FSDP2), for large models."""

    # operation: cannot change the result, and is neither in a step's key nor in a bundle's metadata
    checkpoint_steps: NonNegativeInt = 0
    """Steps between two checkpoints; 0 leaves it to `checkpoint_minutes`."""
    checkpoint_minutes: NonNegativeFloat = 2.0
    """Minutes between two checkpoints; 0 leaves it to `checkpoint_steps`."""
    track: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Where metrics go besides the run's own table."""
    sample_steps: NonNegativeInt = 0
    """Steps between two samples of the model's text in the log; 0 takes none."""
    sample_prompt: str = "\n"
    """What the samples continue."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        for contradiction in self._contradictions():
            raise ValueError(contradiction)
        return self

    def _contradictions(self) -> Iterator[str]:
        """What cannot be meant together, with the remedy."""
        steps, rows = getattr(self, "steps", None), getattr(self, "batch_size", self.processes)
        if steps is not None and self.warmup_steps >= steps:
            yield f"warmup_steps {self.warmup_steps} leaves nothing of the {steps} steps; lower it"
        if rows % self.processes:
            yield f"batch_size {rows} is not a multiple of processes {self.processes}; make it one"
        if getattr(self, "optimizer_state", None) == "paged" and self.optimizer != "adam":
            yield f"optimizer_state paged is adam's; {self.optimizer} keeps its own contiguous"
        rate = "matrix_learning_rate" if self.optimizer == "muon" else "learning_rate"
        if self.optimizer != "adam" and getattr(self, rate, 0) * self.weight_decay > 1:
            yield (
                f"{rate} {getattr(self, rate)} with weight_decay {self.weight_decay} takes more than all "
                "of a weight in a step; lower one of them"
            )
        if self.sharding == "full":
            if self.processes == 1:
                yield "sharding full shares a model among processes; set processes to 2 or more"
            if self.optimizer == "muon":
                yield "muon needs whole matrices, which sharding full cuts; use adam or adamw"
            if self.compile:
                yield "compile does not reach the parts of a sharded model; use sharding none"
            if self.sample_steps:
                yield "no rank of a sharded model can write samples alone; set sample_steps to 0"


class PretrainingConfig(OptimizationConfig):
    """Next-token training of a new model on text."""

    steps: PositiveInt = 100
    context_size: PositiveInt = 32
    """Tokens the model can see at once; becomes the model's maximum context."""
    batch_size: PositiveInt = 4
    validation_fraction: OpenFraction = 0.1
    validation_batch_count: PositiveInt = 4
    evaluation_interval: PositiveInt = 10
    loss_average_window: PositiveInt = 10
    tokenizer_method: Literal["byte", "bpe"] = "bpe"
    vocabulary_size: Annotated[int, Field(strict=True, ge=256, le=2**32 - 1)] = 272
    """Size of the BPE vocabulary (256 bytes plus merges); the byte tokenizer ignores it."""
    minimum_pair_frequency: PositiveInt = 2
    model_width: PositiveInt = 16
    head_count: PositiveInt = 4
    block_count: PositiveInt = 1
    feed_forward_width: PositiveInt = 32
    learning_rate: PositiveFloat = 1e-2
    random_seed: Seed32 = 7
    """Seeds both the initial weights and the batches."""
    validation_random_seed: Seed = 17
    backend: BackendChoice = "auto"
    attention: AttentionKind = "materialized"
    activation_checkpointing: ActivationCheckpointing = "disabled"
    optimizer_state: Literal["contiguous", "paged"] = "contiguous"
    optimizer_page_size: PositiveInt = 4096

    # extension
    sampling_strategy: Literal["random_window", "document_rows", "packed"] = "random_window"
    """`document_rows`: each row of a batch is one document (text between blank lines). `packed`: rows are
    full of whole documents that do not see each other."""
    end_of_text: Flag = False
    """End every document with a token of its own, which no text can contain."""

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.model_width % self.head_count:
            yield (
                f"model_width {self.model_width} is not a multiple of head_count {self.head_count}; "
                "make it one"
            )
        if self.end_of_text and self.sampling_strategy == "random_window":
            yield (
                "end_of_text needs documents, which random_window does not know; "
                "use sampling_strategy document_rows or packed, or end_of_text false"
            )


class PostTrainingConfig(OptimizationConfig):
    """Supervised fine-tuning of a bundle on prompts and responses."""

    steps: PositiveInt = 20
    context_size: PositiveInt = 16
    batch_size: PositiveInt = 2
    evaluation_interval: PositiveInt = 10
    loss_average_window: PositiveInt = 10
    learning_rate: PositiveFloat = 1e-3
    random_seed: Seed = 29
    backend: BackendChoice = "auto"
    fine_tuning_method: Literal["full", "lora", "qlora"] = "full"
    """`qlora`: adapters over linear weights of 4 bits (NF4, Dettmers et al. 2023)."""
    sampling_strategy: Literal["example_uniform", "window_uniform", "document_rows", "packed"] = (
        "example_uniform"
    )
    """Ours are `document_rows`, each row one whole example, and `packed`, rows full of whole examples."""
    lora: LoraConfig = LoraConfig()
    attention: AttentionKind = "materialized"
    activation_checkpointing: ActivationCheckpointing = "disabled"
    nf4_block_size: Nf4BlockSize = 64
    nf4_scale_block_size: Nf4BlockSize = 256
    double_quantization: Flag = True
    optimizer_state: Literal["auto", "contiguous", "paged"] = "auto"
    """`auto` is paged for qlora, else contiguous."""
    optimizer_page_size: PositiveInt = 4096

    # extension
    loss_scope: LossScope = "full_sequence"
    """`response_only`: only the tokens of responses are learned; prompts are context."""

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.optimizer == "muon" and self.fine_tuning_method != "full":
            yield "muon moves whole matrices, of which adapters have none; use adam or adamw"
        if self.sharding == "full" and self.fine_tuning_method == "qlora":
            yield "packed weights cannot be sharded; use sharding none with qlora"
        if self.loss_scope == "response_only" and self.sampling_strategy.endswith("_uniform"):
            yield (
                f"{self.sampling_strategy} cuts responses from their prompts; with loss_scope response_only "
                "use sampling_strategy document_rows or packed"
            )


OPERATION = ("checkpoint_steps", "checkpoint_minutes", "track", "sample_steps", "sample_prompt")
"""Fields of a training configuration that cannot change the result."""


def contract_dump(config: PretrainingConfig | PostTrainingConfig) -> dict[str, Any]:
    """The `training_config` metadata: every contract field, and an extension only where it was changed."""
    extensions = OptimizationConfig.model_fields.keys() | {"end_of_text", "loss_scope"}
    if isinstance(config, PretrainingConfig):
        extensions |= {"sampling_strategy"}
    fields = type(config).model_fields
    values = config.model_dump(mode="json", exclude=set(OPERATION))
    return {k: v for k, v in values.items() if k not in extensions or v != fields[k].default}
