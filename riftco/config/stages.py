"""Settings of the stages around training: the data, the search for a LoRA rank, and what is sampled."""

from typing import Annotated, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from artifacts.checks import positive_float32
from riftco.config.fields import Config, Fraction, OpenFraction, PositiveFloat, PositiveInt, Seed, Source
from riftco.config.training import LoraConfig, PostTrainingConfig

AnyConfig = TypeVar("AnyConfig", bound=Config)


class CorpusConfig(Config):
    """Raw text: the built-in micro-world, or files of your own."""

    path: Source | None = None
    """A text file or a folder of `.txt` files; none generates micro-world stories."""
    stories: PositiveInt = 20_000
    """Micro-world stories to generate."""
    events: Annotated[tuple[Annotated[int, Field(strict=True, ge=1, le=8)], ...], Field(min_length=1)] = (
        1,
        2,
    )
    """How many events a micro-world story has, each number equally often."""
    random_seed: Seed = 7
    validation_fraction: OpenFraction = 0.02

    @field_validator("events")
    @classmethod
    def _equally_often(cls, events: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(events)) != len(events):
            raise ValueError(f"events must be distinct, got {events}: each number comes equally often")
        return events

    def effective(self) -> Self:
        """The settings that change the result: with a path, the generator's are back at their defaults."""
        return self if self.path is None else _with_defaults(self, "stories", "events", "random_seed")


class InstructionsConfig(Config):
    """Instruction data: micro-world questions, or a JSONL file of your own."""

    path: Source | None = None
    """A JSONL file with `prompt` and `response` on each line, or as OpenAI, Alpaca or Dolly have them; none
    generates micro-world questions."""
    examples: PositiveInt = 12_000
    """Micro-world questions to generate."""
    random_seed: Seed = 11
    split_seed: str = "7"
    """Label of the stable hash that assigns each record to a split."""
    train_fraction: Fraction = 0.94
    validation_fraction: Fraction = 0.03
    test_fraction: Fraction = 0.03

    @model_validator(mode="after")
    def _fractions_are_a_whole(self) -> Self:
        total = self.train_fraction + self.validation_fraction + self.test_fraction
        if abs(total - 1) > 1e-12:
            raise ValueError(
                f"train_fraction {self.train_fraction}, validation_fraction {self.validation_fraction} and "
                f"test_fraction {self.test_fraction} add up to {total:.6g}; make it 1"
            )
        return self

    def effective(self) -> Self:
        """The settings that change the result: with a path, the generator's are back at their defaults."""
        return self if self.path is None else _with_defaults(self, "examples", "random_seed")


class RankSweepConfig(Config):
    """LoRA ranks to try from the same base; the lowest validation loss wins, then the lower rank."""

    ranks: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (2, 8)
    alpha_over_rank: PositiveFloat = 2.0
    training: PostTrainingConfig = PostTrainingConfig(fine_tuning_method="lora")

    @model_validator(mode="after")
    def _is_a_sweep_of_adapters(self) -> "RankSweepConfig":
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"ranks must be distinct, got {self.ranks}")
        if self.training.fine_tuning_method != "lora":
            raise ValueError("training.fine_tuning_method must be lora: ranks are those of LoRA adapters")
        for rank in self.ranks:
            positive_float32(f"alpha_over_rank times rank {rank}", self.alpha_over_rank * rank)
        return self

    def lora(self, rank: int) -> LoraConfig:
        """The adapters of a rank."""
        alpha = self.alpha_over_rank * rank
        return LoraConfig.model_validate(dict(self.training.lora) | {"rank": rank, "alpha": alpha})


class EvaluationConfig(Config):
    """What is sampled from the models for the report."""

    stories: PositiveInt = 60
    questions: PositiveInt = 150
    random_seed: Seed = 3


def _with_defaults(config: AnyConfig, *names: str) -> AnyConfig:
    return config.model_copy(update={name: type(config).model_fields[name].default for name in names})
