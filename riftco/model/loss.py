"""The training objective: mean cross-entropy of the next token."""

from torch import Tensor
from torch.nn import functional

_IGNORED = -100  # torch's mark for positions that do not count


def cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over positions of -log softmax(logits)[target], a float32 scalar.

    logits `[B, T, V]`, targets int64 `[B, T]`, mask bool `[B, T]` with the positions that count (all by
    default). ValueError for a target outside the vocabulary or a mask that selects nothing.
    """
    vocabulary_size = logits.shape[-1]
    if mask is not None:
        if not bool(mask.any()):
            raise ValueError("no position is selected for the loss")
        targets = targets.masked_fill(~mask, _IGNORED)
    selected = targets if mask is None else targets[mask]
    if int(selected.min()) < 0 or int(selected.max()) >= vocabulary_size:
        raise ValueError(f"a target is outside the vocabulary of {vocabulary_size}")
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=_IGNORED)
