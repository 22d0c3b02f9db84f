"""Settings of the flows; their defaults are the demo's recipe."""

from typing import Annotated

from pydantic import StringConstraints, model_validator

from riftco.config.fields import Config, Source
from riftco.config.serving import ServingConfig
from riftco.config.stages import CorpusConfig, EvaluationConfig, InstructionsConfig, RankSweepConfig
from riftco.config.training import LORA_TARGETS, LoraConfig, PostTrainingConfig, PretrainingConfig

_DEMO_PRETRAINING = PretrainingConfig(
    backend="cpu",  # `auto` would be keyed as that word, whatever machine made the result
    steps=1200,
    context_size=144,
    batch_size=32,
    evaluation_interval=120,
    vocabulary_size=608,
    end_of_text=True,  # so that an answer ends where it ends
    model_width=128,
    head_count=8,
    block_count=4,
    feed_forward_width=256,
    learning_rate=8e-3,
    attention="flash",
    optimizer="muon",
    matrix_learning_rate=0.03,
    schedule="trapezoid",
    warmup_steps=40,
    cooldown_fraction=0.7,
    sampling_strategy="document_rows",
)
_DEMO_POST_TRAINING = PostTrainingConfig(
    backend="cpu",
    steps=600,
    context_size=144,
    batch_size=32,
    evaluation_interval=100,
    learning_rate=4e-3,
    attention="flash",
    optimizer="muon",
    matrix_learning_rate=0.03,
    schedule="trapezoid",
    warmup_steps=10,
    cooldown_fraction=0.8,
    sampling_strategy="document_rows",
    loss_scope="response_only",
)
_DEMO_RANK_TRAINING = _DEMO_POST_TRAINING.model_copy(
    update={
        "fine_tuning_method": "lora",
        "lora": LoraConfig(targets=LORA_TARGETS),
        "optimizer": "adamw",
        "steps": 50,
        "learning_rate": 5e-3,
        "schedule": "cosine",
    }
)

RunName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]


class PretrainFlowConfig(Config):
    """Raw text to a new model. The defaults learn the micro-world."""

    name: RunName = "pretrain"
    """Name of the run: results are found under runs/<name>."""
    corpus: CorpusConfig = CorpusConfig()
    pretraining: PretrainingConfig = _DEMO_PRETRAINING
    evaluation: EvaluationConfig = EvaluationConfig()


class FinetuneFlowConfig(Config):
    """A model of the store or a file, tuned on instructions, scored on held-out ones, and served."""

    name: RunName = "finetune"
    """Name of the run: results are found under runs/<name>."""
    base: Source = "demo/pretrain"
    """The model to tune: a .rift file, a name such as demo/pretrain, or an artifact id."""
    instructions: InstructionsConfig = InstructionsConfig()
    post_training: PostTrainingConfig = _DEMO_POST_TRAINING
    evaluation: EvaluationConfig = EvaluationConfig()
    serving: ServingConfig = ServingConfig()


class PipelineConfig(Config):
    """The whole pipeline. The defaults are the demo: a micro-world learned in minutes on two cores."""

    name: RunName = "demo"
    """Name of the run: results are found under runs/<name>."""
    corpus: CorpusConfig = CorpusConfig()
    instructions: InstructionsConfig = InstructionsConfig()
    pretraining: PretrainingConfig = _DEMO_PRETRAINING
    post_training: PostTrainingConfig = _DEMO_POST_TRAINING
    rank_sweep: RankSweepConfig = RankSweepConfig(training=_DEMO_RANK_TRAINING)
    evaluation: EvaluationConfig = EvaluationConfig()
    serving: ServingConfig = ServingConfig()

    @model_validator(mode="after")
    def _stages_fit_the_model(self) -> "PipelineConfig":
        model = self.pretraining
        tunings = {"post_training": self.post_training, "rank_sweep.training": self.rank_sweep.training}
        for name, tuning in tunings.items():
            if tuning.context_size > model.context_size:
                raise ValueError(
                    f"{name}.context_size {tuning.context_size} exceeds pretraining.context_size "
                    f"{model.context_size}; lower the one or raise the other"
                )
        sweep, tuning = self.rank_sweep, self.post_training
        ranks = {"rank_sweep.ranks": (max(sweep.ranks), sweep.training.lora.targets)}
        if tuning.fine_tuning_method != "full":
            ranks["post_training.lora.rank"] = (tuning.lora.rank, tuning.lora.targets)
        for name, (rank, targets) in ranks.items():
            inner = any(target.startswith("feed_forward.") for target in targets)
            least = min(model.model_width, model.feed_forward_width) if inner else model.model_width
            if rank > least:
                raise ValueError(f"{name}: {rank} exceeds {least}, a side of the model; lower it")
        return self
