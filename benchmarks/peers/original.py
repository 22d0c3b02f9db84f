"""The original, riftco-transformer: its own Adam, one row at a time where a batch would take minutes."""

from collections.abc import Callable
from itertools import chain

from benchmarks.peers.work import LEARNING_RATE, RANK, VOCABULARY, Size, batches


def step(size: Size, method: str, variant: str) -> Callable[[], None]:
    """`variant` is not looked at."""
    import riftco_transformer as original

    if size.width > 256:
        raise ValueError("a step would take half an hour")
    config = original.TransformerConfig(
        vocabulary_size=VOCABULARY,
        maximum_context=size.context,
        model_width=size.width,
        head_count=size.heads,
        block_count=size.blocks,
        feed_forward_width=4 * size.width,
    )
    model = original.DecoderOnlyTransformer(config, attention="flash")
    if method == "qlora":
        model.quantize_nf4()
    if method != "full":
        names = [name for name in original.LORA_TARGET_NAMES if name != "language_model_head"]
        model.attach_lora(original.LoraConfig(rank=RANK, alpha=2.0 * RANK, targets=tuple(names)))
    parameters = model.parameters() if method == "full" else model.adapter_parameters()
    optimizer = original.Adam(parameters, learning_rate=LEARNING_RATE)
    source = batches(size)

    def take() -> None:
        inputs, targets = (ids.tolist() for ids in next(source))
        loss = original.cross_entropy(model(inputs), list(chain.from_iterable(targets)))
        loss.backward()
        optimizer.step()
        optimizer.zero_gradients()

    return take
