"""The decoder-only transformer: pre-norm, learned absolute positions, biases everywhere, untied head.

Parameter names and their order are the bundle's (`ModelConfig.parameter_specs`). B batch, T time, n new
tokens, V vocabulary, D model width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from artifacts import ModelConfig
from kernels import Operands, flash_attention, materialized_attention
from riftco.config import ActivationCheckpointing, AttentionKind
from riftco.model.initialization import UniformStream, embedding_bound, xavier_bound
from riftco.model.layers import Attend, Block, Embedding, KvCache, LayerNorm, Linear
from riftco.model.live_model import LiveModel

Precision = Literal["fp32", "bf16", "int8"]
_OPERANDS: dict[Precision, Operands] = {"fp32": "full", "bf16": "half", "int8": "int8"}


class DecoderOnlyTransformer(LiveModel):
    """A model built from its configuration, on the CPU, with bit-exact initial weights.

    `attention` and `activation_checkpointing` are run-time policies: they change cost, not results. So is
    `precision`, but for the operands of matrix products, which `bf16` and `int8` round.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self._attention: AttentionKind = "materialized"
        self._activation_checkpointing: ActivationCheckpointing = "disabled"
        self._precision: Precision = "fp32"
        self._compiled = False
        width, epsilon = config.model_width, config.layer_norm_epsilon
        self.token_embedding = Embedding(config.vocabulary_size, width)
        self.position_embedding = Embedding(config.maximum_context, width)
        self.blocks = nn.ModuleList(
            Block(width, config.head_count, config.feed_forward_width, epsilon)
            for _ in range(config.block_count)
        )
        self.final_norm = LayerNorm(width, epsilon)
        self.language_model_head = Linear(width, config.vocabulary_size)
        self._initialize(UniformStream(config.random_seed))

    def _initialize(self, stream: UniformStream) -> None:
        for embedding in (self.token_embedding, self.position_embedding):
            stream.fill(embedding.weight, embedding_bound(self.config.model_width))
        for _, linear in self.projections():
            assert linear.weight is not None
            stream.fill(linear.weight, xavier_bound(linear.fan_in, linear.fan_out))

    @property
    def attention(self) -> AttentionKind:
        return self._attention

    @attention.setter
    def attention(self, kind: AttentionKind) -> None:
        _require(kind, get_args(AttentionKind), "attention")
        self._attention = kind

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing:
        return self._activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, kind: ActivationCheckpointing) -> None:
        _require(kind, get_args(ActivationCheckpointing), "activation_checkpointing")
        self._activation_checkpointing = kind

    @property
    def precision(self) -> Precision:
        return self._precision

    @precision.setter
    def precision(self, kind: Precision) -> None:
        _require(kind, get_args(Precision), "precision")
        for _, linear in self.projections():
            linear.operands = _OPERANDS[kind]
        self._precision = kind

    def compile_blocks(self) -> None:
        """Let `torch.compile` translate the blocks' training, for all shapes at once: up to a minute each.

        What needs no gradient, evaluation and decoding, runs as before.
        """
        for block in self.blocks:
            block.compile(dynamic=True)
        self._compiled = True

    def _attend(self) -> Callable[..., Tensor]:
        """Attention itself: its definition is for comparison and rounds nothing."""
        if self._attention == "materialized":
            return materialized_attention
        return partial(flash_attention, operands="full" if self._precision == "fp32" else "half")

    def _callable(self, block: nn.Module) -> Callable[[Tensor, Attend], Tensor]:
        """What runs a block: its translation, if there is one, only where gradients are wanted."""
        return block.forward if self._compiled and not torch.is_grad_enabled() else block

    def forward(self, token_ids: Tensor | Sequence[int], *, document_starts: Tensor | None = None) -> Tensor:
        """Logits `[B, T, V]` for int64 ids `[B, T]`; a flat sequence is one row. ValueError out of range.

        With `document_starts`, int64 `[B, T]`, a row holds several documents: each token names the place in
        the row where its own begins, sees nothing before it, and has position 0 there. The row may be longer
        than the maximum context then, a document may not.
        """
        hidden = self.hidden(token_ids, document_starts=document_starts)
        return self.activity.watched(self.language_model_head(hidden))

    def hidden(self, token_ids: Tensor | Sequence[int], *, document_starts: Tensor | None = None) -> Tensor:
        """What the head turns into logits, `[B, T, D]`, for the arguments that `forward` takes."""
        ids = self._check(token_ids, whole_rows=document_starts is None)
        ids = ids[None] if ids.ndim == 1 else ids
        attend: Attend = partial(self._attend(), document_starts=document_starts)
        if document_starts is None:
            x = self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        else:
            positions = _positions(document_starts, ids, self.config.maximum_context)
            x = self.token_embedding(ids) + self.position_embedding(positions)
        for block in self.blocks:
            if self._activation_checkpointing == "block" and torch.is_grad_enabled():
                x = checkpoint(_replayable(block), x, attend, use_reentrant=False)
            else:
                x = self._callable(block)(x, attend)
        return self.activity.watched(self.final_norm(x))

    @torch.no_grad()
    def decode(self, token_ids: Tensor | Sequence[int], cache: KvCache) -> Tensor:
        """Append n tokens to a cache and return their logits `[n, V]`; on any failure the cache is unchanged.

        Equal to the last n rows of `forward` over the whole visible sequence.
        """
        ids = self._check(token_ids, start=cache.size)
        cache.begin(len(ids))
        try:
            positions = slice(cache.size, cache.size + len(ids))
            x = (self.token_embedding(ids) + self.position_embedding.weight[positions])[None]
            for layer, block in enumerate(self.blocks):
                x = self._callable(block)(x, partial(cache.append_and_attend, layer))
            logits = self.language_model_head(self.final_norm(x))[0]
            cache.commit()
        except BaseException:
            cache.abort()
            raise
        return logits

    def _check(self, token_ids: Tensor | Sequence[int], start: int = 0, *, whole_rows: bool = True) -> Tensor:
        """The ids as int64 here; ValueError when they are none, too many or not in the vocabulary."""
        ids = torch.as_tensor(token_ids, device=self.device)
        if ids.is_floating_point() and ids.numel():
            raise ValueError(f"token ids must be integers, got {ids.dtype}")
        ids = ids.to(torch.int64)
        length = ids.shape[-1] if ids.ndim else 0
        if ids.ndim not in (1, 2) or not ids.numel():
            raise ValueError(f"token ids must be a non-empty row or rectangle, got shape {list(ids.shape)}")
        if whole_rows and start + length > self.config.maximum_context:
            raise ValueError(
                f"{start + length} tokens do not fit the maximum context {self.config.maximum_context}"
            )
        lowest, highest = (int(bound) for bound in torch.aminmax(ids))
        if lowest < 0 or highest >= self.config.vocabulary_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.config.vocabulary_size}")
        return ids


def _positions(document_starts: Tensor, ids: Tensor, maximum_context: int) -> Tensor:
    """How far each token is from the start of its document, `[B, T]`; ValueError where it is too far."""
    if document_starts.shape != ids.shape or document_starts.device != ids.device:
        raise ValueError(
            f"document_starts must be {list(ids.shape)} on {ids.device} as the ids are, "
            f"got {list(document_starts.shape)} on {document_starts.device}"
        )
    positions = torch.arange(ids.shape[1], device=ids.device) - document_starts
    if document_starts.dtype != torch.int64 or bool(((positions < 0) | (document_starts < 0)).any()):
        raise ValueError(
            "document_starts must be int64 places, none after the place it belongs to or below 0"
        )
    longest = int(positions.max()) + 1
    if longest > maximum_context:
        raise ValueError(f"a document of {longest} tokens does not fit the maximum context {maximum_context}")
    return positions


def _replayable(block: nn.Module) -> Callable[[Tensor, Attend], Tensor]:
    """The block, with a RuntimeError if it is run again, for its gradients, after its parameters changed."""
    parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
    versions = [parameter._version for parameter in parameters]
    operands = _operands(block)

    def run(x: Tensor, attend: Attend) -> Tensor:
        if [parameter._version for parameter in parameters] != versions or _operands(block) != operands:
            raise RuntimeError(
                "parameters or precision changed since this graph was built; run forward again"
            )
        return block(x, attend)

    return run


def _operands(block: nn.Module) -> list[Operands]:
    return [module.operands for module in block.modules() if isinstance(module, Linear)]


def _require(value: str, allowed: tuple[str, ...], name: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
