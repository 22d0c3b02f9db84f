"""The decoder-only transformer: pre-norm, learned absolute positions, biases everywhere, untied head.

Parameter names and their order are the bundle's (`ModelConfig.parameter_specs`). B batch, T time, n new
tokens, V vocabulary, D model width.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from artifacts import ModelConfig
from kernels import flash_attention, materialized_attention
from riftco.backends import BackendName, backend_of, torch_device
from riftco.config import ActivationCheckpointing, AttentionKind, LoraConfig
from riftco.model import lora
from riftco.model.initialization import UniformStream, embedding_bound, xavier_bound
from riftco.model.layers import Block, Embedding, KvCache, LayerNorm, Linear

_ATTEND = {"materialized": materialized_attention, "flash": flash_attention}


class DecoderOnlyTransformer(nn.Module):
    """A model built from its configuration, on the CPU, with bit-exact initial weights.

    `attention` and `activation_checkpointing` are run-time policies: they change cost, not results.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.lora: LoraConfig | None = None
        self.lora_merged = False
        self._attention: AttentionKind = "materialized"
        self._activation_checkpointing: ActivationCheckpointing = "disabled"
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
            fan_out, fan_in = linear.weight.shape
            stream.fill(linear.weight, xavier_bound(fan_in, fan_out))

    @property
    def device(self) -> torch.device:
        return self.token_embedding.weight.device

    @property
    def backend(self) -> BackendName:
        return backend_of(self.device)

    def move_to(self, backend: BackendName) -> "DecoderOnlyTransformer":
        """Move all weights to a backend; returns the model."""
        return self.to(torch_device(backend))

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

    def projections(self) -> Iterator[tuple[str, Linear]]:
        """Every linear layer with its name, in the order of initialisation, adapters and NF4 packing."""
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                yield name, module

    def base_parameters(self) -> dict[str, nn.Parameter]:
        """The bundle's parameters by name, in the bundle's order; adapters are not among them."""
        return {name: p for name, p in self.named_parameters() if ".lora_" not in name}

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        """The adapter's parameters by name, A before B, projection by projection; empty without LoRA."""
        return {name: p for name, p in self.named_parameters() if ".lora_" in name}

    def attach_lora(self, config: LoraConfig) -> None:
        """Attach fresh adapters and freeze the rest; once per model. ValueError if a rank does not fit."""
        if self.lora is not None or self.lora_merged:
            raise ValueError("LoRA is attached once per model; open the base bundle again for a new adapter")
        lora.attach({n: linear for n, linear in self.projections() if _target(n) in config.targets}, config)
        for parameter in self.base_parameters().values():
            parameter.requires_grad_(False)
        self.lora = config

    def merge_lora(self) -> None:
        """Fold the adapters into their weights; all or nothing. ValueError without adapters."""
        if self.lora is None:
            raise ValueError("there is no LoRA adapter to merge; attach_lora comes first")
        lora.merge(linear for _, linear in self.projections())
        for parameter in self.base_parameters().values():
            parameter.requires_grad_(True)
        self.lora, self.lora_merged = None, True

    def forward(self, token_ids: Tensor | Sequence[int]) -> Tensor:
        """Logits `[B, T, V]` for int64 ids `[B, T]`; a flat sequence is one row. ValueError out of range."""
        return self.language_model_head(self.hidden(token_ids))

    def hidden(self, token_ids: Tensor | Sequence[int]) -> Tensor:
        """What the head turns into logits, `[B, T, D]`, for the ids that `forward` takes."""
        ids = self._check(torch.as_tensor(token_ids, dtype=torch.int64, device=self.device))
        ids = ids[None] if ids.ndim == 1 else ids
        x = self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        attend = _ATTEND[self._attention]
        for block in self.blocks:
            if self._activation_checkpointing == "block" and torch.is_grad_enabled():
                x = checkpoint(block, x, attend, use_reentrant=False)
            else:
                x = block(x, attend)
        return self.final_norm(x)

    @torch.no_grad()
    def decode(self, token_ids: Tensor | Sequence[int], cache: KvCache) -> Tensor:
        """Append n tokens to a cache and return their logits `[n, V]`; on any failure the cache is unchanged.

        Equal to the last n rows of `forward` over the whole visible sequence.
        """
        ids = self._check(torch.as_tensor(token_ids, dtype=torch.int64, device=self.device), start=cache.size)
        cache.begin(len(ids))
        try:
            positions = slice(cache.size, cache.size + len(ids))
            x = (self.token_embedding(ids) + self.position_embedding.weight[positions])[None]
            for layer, block in enumerate(self.blocks):
                x = block(x, partial(cache.append_and_attend, layer))
            logits = self.language_model_head(self.final_norm(x))[0]
            cache.commit()
        except BaseException:
            cache.abort()
            raise
        return logits

    def _check(self, ids: Tensor, start: int = 0) -> Tensor:
        """The ids as given; ValueError when they are none, too many or not in the vocabulary."""
        length = ids.shape[-1] if ids.ndim else 0
        if ids.ndim not in (1, 2) or not ids.numel():
            raise ValueError(f"token ids must be a non-empty row or rectangle, got shape {list(ids.shape)}")
        if start + length > self.config.maximum_context:
            raise ValueError(
                f"{start + length} tokens do not fit the maximum context {self.config.maximum_context}"
            )
        lowest, highest = (int(bound) for bound in torch.aminmax(ids))
        if lowest < 0 or highest >= self.config.vocabulary_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.config.vocabulary_size}")
        return ids


def _target(projection: str) -> str:
    """The adapter target a projection belongs to: its name without its block."""
    return projection.split(".", 2)[-1] if projection.startswith("blocks.") else projection


def _require(value: str, allowed: tuple[str, ...], name: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
