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
        """A new model on the CPU with these values. ValueError, before it is made, if they do not fit."""
        self._require_own_parameters()
        model = DecoderOnlyTransformer(self.config)
        self.load_into(model)
        return model

    def _require_own_parameters(self) -> None:
        """ValueError unless names and shapes are the configuration's, however many blocks that asks for."""
        own = self.config.parameter_specs() if self.config.block_count <= len(self.tensors) else ()
        if list(self.tensors) != [spec.name for spec in own]:
            raise ValueError("artifact parameter names do not match model")
        for spec in own:
            if tuple(self.tensors[spec.name].shape) != spec.shape:
                raise ValueError(f"artifact parameter shapes do not match model: {spec.name}")
