"""The training objective: mean cross-entropy of the next token."""

from torch import Tensor

from kernels import cross_entropy, linear_cross_entropy
from riftco.model.transformer import DecoderOnlyTransformer


def next_token_loss(
    model: DecoderOnlyTransformer, token_ids: Tensor, targets: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Mean over positions of -log softmax(logits)[target], a float32 scalar.

    token_ids and targets int64 `[B, T]`, mask bool `[B, T]` with the positions that count (all by default).
    The logits of a head without an adapter never exist at once. ValueError for a target outside the
    vocabulary or a mask that selects nothing.
    """
    if mask is not None and not bool(mask.any()):
        raise ValueError("no position is selected for the loss")
    head = model.language_model_head
    if head.lora_a is not None:
        return cross_entropy(model(token_ids), targets, mask=mask)
    return linear_cross_entropy(model.hidden(token_ids), head.weight, head.bias, targets, mask=mask)
