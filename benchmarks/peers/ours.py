"""riftco: flash attention; AdamW, whose memory is the peers', or for adapters too."""

from collections.abc import Callable

from artifacts import ModelConfig
from benchmarks.peers.work import LEARNING_RATE, RANK, VOCABULARY, Size, batches
from riftco.config import LORA_TARGETS, LoraConfig
from riftco.model import DecoderOnlyTransformer, next_token_loss
from riftco.training.adamw import AdamW


def step(size: Size, method: str, variant: str) -> Callable[[], None]:
    """`variant`: fp32, bf16 or int8, and `compiled`."""
    config = ModelConfig(
        vocabulary_size=VOCABULARY,
        maximum_context=size.context,
        model_width=size.width,
        head_count=size.heads,
        block_count=size.blocks,
        feed_forward_width=4 * size.width,
    )
    model = DecoderOnlyTransformer(config)
    model.attention = "flash"
    model.precision = variant.split()[0]
    if method == "qlora":
        model.quantize_nf4()
    if method != "full":
        targets = tuple(target for target in LORA_TARGETS if target != "language_model_head")
        model.attach_lora(LoraConfig(rank=RANK, alpha=2.0 * RANK, targets=targets))
    parameters = model.base_parameters() if method == "full" else model.adapter_parameters()
    optimizer = AdamW(parameters, LEARNING_RATE, weight_decay=0.1)
    if "compiled" in variant:
        model.compile_blocks()
    source = batches(size)

    def take() -> None:
        next_token_loss(model, *next(source)).backward()
        optimizer.step()

    return take
