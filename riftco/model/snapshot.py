"""An in-memory copy of a model and its tokenizer: what training hands to serving without a file."""

from dataclasses import dataclass, replace
from typing import Self

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
        """Copy a live model. RuntimeError with adapters or packed weights, ValueError if not finite."""
        if model.lora is not None or model.quantized:
            what = "unmerged LoRA adapters" if model.lora is not None else "packed weights"
            raise RuntimeError(f"the model has {what}; merge them first")
        tensors = {name: p.detach().cpu().clone() for name, p in model.base_parameters().items()}
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} has values that are not finite")
        return cls(model.config, tokenizer.spec, tensors)

    def load_into(self, model: DecoderOnlyTransformer) -> None:
        """Copy the tensors into a model of this configuration, whatever its seed.

        ValueError, before any change, if they do not fit, or while anything computes with the model's values.
        """
        if model.lora is not None:
            raise ValueError("cannot load parameters while LoRA adapters are attached")
        if replace(self.config, random_seed=model.config.random_seed) != model.config:
            raise ValueError(f"the snapshot's {self.config} is not the model's {model.config}")
        model.load_base_values(self.tensors)

    def build(self) -> DecoderOnlyTransformer:
        """A new model on the CPU with these values."""
        model = DecoderOnlyTransformer(self.config)
        self.load_into(model)
        return model
