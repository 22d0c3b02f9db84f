"""What would end a run only after its longest stages, found out as soon as there is a tokenizer."""

from artifacts import Ref, TokenizerSpec
from riftco.config import PostTrainingConfig
from riftco.errors import InputError, TokenizerError
from tasks.call import Results, Work
from tasks.prepare import put_json, read_json
from tasks.step import step
from tasks.train import read_examples

_CHECKED = {"context_size", "fine_tuning_method", "sampling_strategy", "loss_scope", "lora"}


@step(
    version=1,
    ignore=[
        "config.lora.rank",
        "config.lora.alpha",
        "config.lora.random_seed",
        *(f"config.{name}" for name in PostTrainingConfig.model_fields if name not in _CHECKED),
    ],
)
def check_tuning(
    work: Work,
    tokenizer: Ref,
    instructions: dict[str, Ref],
    setting: str,
    rank: int,
    config: PostTrainingConfig,
) -> Results:
    """How many examples each split has; InputError unless all can be encoded and trained on as configured.

    `tokenizer` may be a bundle, whose own is meant; `setting` is where the configuration comes from, and
    `rank` the highest to be tried.
    """
    from riftco.data import PlainChatFormatter
    from riftco.tokenizer import Tokenizer
    from riftco.training.instruction_batches import instruction_batches

    if tokenizer.kind == "bundle":
        spec = work.store.load_bundle(tokenizer).tokenizer
    else:
        spec = TokenizerSpec.from_json(read_json(work.store, tokenizer))
    splits = {name: read_examples(work, ref) for name, ref in instructions.items()}
    formatter = PlainChatFormatter()
    with Tokenizer.from_spec(spec) as fitted:
        for name, examples in splits.items():
            for number, example in enumerate(examples, start=1):
                try:
                    fitted.encode(formatter.format(example))
                except TokenizerError as error:
                    where = f"record {number} of the {name} split, {example.prompt[:40]!r}"
                    raise InputError(f"instructions: {where}: {error}") from None
        try:
            instruction_batches(fitted, splits["train"], formatter, config)
        except InputError as error:
            raise InputError(f"{setting}: {error}") from None
        if (
            config.fine_tuning_method != "full"
            and "language_model_head" in config.lora.targets
            and rank > fitted.vocab_size
        ):
            raise InputError(
                f"{setting}: rank {rank} exceeds the vocabulary of {fitted.vocab_size} ids, a side of "
                "language_model_head; lower it or leave that out of lora.targets"
            )
    return {"facts": put_json(work.store, "facts", {name: len(split) for name, split in splits.items()})}
