"""The training objective: mean cross-entropy of the next token."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import cross_entropy, linear_cross_entropy
from riftco.model.layers import Linear
from riftco.model.transformer import DecoderOnlyTransformer


def next_token_loss(
    model: DecoderOnlyTransformer,
    token_ids: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    document_starts: Tensor | None = None,
) -> Tensor:
    """Mean over positions of -log softmax(logits)[target], a float32 scalar.

    token_ids and targets int64 `[B, T]`, mask bool `[B, T]` with the positions that count (all by default),
    document_starts int64 `[B, T]` where rows hold several documents (as in `DecoderOnlyTransformer.forward`).
    The logits never exist all at once. ValueError for a target outside the vocabulary or a mask that selects
    nothing.
    """
    if mask is not None and not bool(mask.any()):
        raise ValueError("no position is selected for the loss")
    head, hidden = model.language_model_head, model.hidden(token_ids, document_starts=document_starts)
    if head.weight is None or head.lora_a is not None:
        loss = _loss_by_chunks(head, hidden.flatten(0, -2), targets.flatten(), mask)
    else:
        loss = linear_cross_entropy(
            hidden, head.weight, head.bias, targets, mask=mask, operands=head.operands
        )
    return model.activity.watched(loss)


def _loss_by_chunks(head: Linear, hidden: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
    """The mean loss of rows `[N, D]` under a packed or adapted head, the logits of some rows at a time."""
    trained = [p for p in head.parameters() if p.requires_grad and torch.is_grad_enabled()]
    loss: Tensor = _ChunkedLoss.apply(
        head, targets, None if mask is None else mask.flatten(), hidden, *trained
    )
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """Differentiates each chunk once its loss is there, so that no logits are kept or computed twice."""

    @staticmethod
    def forward(
        ctx: Any, head: Linear, targets: Tensor, mask: Tensor | None, hidden: Tensor, *trained: Tensor
    ) -> Tensor:
        count = len(targets) if mask is None else mask.sum()
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[3] else None
        of_trained = [torch.zeros_like(parameter) for parameter in trained]
        losses = []
        step = _rows_at_once(hidden, head.fan_out)
        for part in (slice(first, first + step) for first in range(0, len(hidden), step)):
            counted = None if mask is None else mask[part]
            with torch.set_grad_enabled(any(ctx.needs_input_grad)):
                rows = hidden[part].detach().requires_grad_(of_hidden is not None)
                loss = cross_entropy(head(rows), targets[part], mask=counted, reduction="sum") / count
            losses.append(loss.detach())
            if loss.requires_grad:
                sources = [rows, *trained] if of_hidden is not None else trained
                found = list(torch.autograd.grad(loss, sources))
                if of_hidden is not None:
                    of_hidden[part] = found.pop(0)
                for total, gradient in zip(of_trained, found, strict=True):
                    total += gradient
        ctx.save_for_backward(of_hidden, *of_trained, *trained)  # the last, to notice when they change
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, *rest = ctx.saved_tensors
        gradients = [of_hidden, *rest[: len(rest) // 2]]
        return None, None, None, *(None if g is None else g * upstream for g in gradients)


def _rows_at_once(hidden: Tensor, vocabulary_size: int) -> int:
    """So many that their logits stay in a CPU's outer cache, or fill a GPU; few would waste the products."""
    budget = 2**21 if hidden.device.type == "cpu" else 2**26
    return max(budget // vocabulary_size, 320)
