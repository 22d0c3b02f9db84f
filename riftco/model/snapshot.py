"""An in-memory copy of a model and its tokenizer: what training hands to serving without a file."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from artifacts import ModelConfig, TokenizerSpec
from riftco.model.transformer import DecoderOnlyTransformer
from riftco.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """Configuration, tokenizer state and ordered named float32 CPU tensors."""

    config: ModelConfig
    tokenizer: TokenizerSpec
    tensors: dict[str, Tensor]

    @classmethod
    def capture(cls, model: DecoderOnlyTransformer, tokenizer: Tokenizer) -> Self:
        """Copy a live model. RuntimeError while adapters are attached, ValueError for values not finite."""
        if model.lora is not None:
            raise RuntimeError("the model has unmerged LoRA adapters; merge them first")
        tensors = {name: p.detach().cpu().clone() for name, p in model.base_parameters().items()}
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} has values that are not finite")
        return cls(model.config, tokenizer.spec, tensors)

    @torch.no_grad()
    def load_into(self, model: DecoderOnlyTransformer) -> None:
        """Copy the tensors into a model of this shape; ValueError, before any change, if they do not fit."""
        if model.lora is not None:
            raise ValueError("cannot load parameters while LoRA adapters are attached")
        parameters = model.base_parameters()
        if list(parameters) != list(self.tensors):
            raise ValueError("artifact parameter names do not match model")
        for name, parameter in parameters.items():
            if parameter.shape != self.tensors[name].shape:
                raise ValueError(f"artifact parameter shapes do not match model: {name}")
        for name, parameter in parameters.items():
            parameter.copy_(self.tensors[name])

    def build(self) -> DecoderOnlyTransformer:
        """A new model on the CPU with these values."""
        model = DecoderOnlyTransformer(self.config)
        self.load_into(model)
        return model
