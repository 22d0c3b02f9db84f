"""What a model is beside its mathematics: where it lives, its parameters, its adapters, its 4-bit weights.

Whatever changes it from outside a training step is here, under its locks (`riftco.model.activity`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn, Self

import torch
from torch import Tensor, nn

from artifacts import PackedNf4Weight
from riftco.backends import BackendName, backend_of, torch_device
from riftco.config import LoraConfig
from riftco.model import lora, nf4
from riftco.model.activity import Activity, Kind
from riftco.model.layers import Linear
from riftco.model.parameters import ParameterList, copy_values


class LiveModel(nn.Module):
    """Base of the transformer. Not copyable; what would change it under a live dependant is a ValueError."""

    def __init__(self) -> None:
        super().__init__()
        self.activity = Activity()
        self.quantized = False
        self.lora: LoraConfig | None = None
        self.lora_merged = False

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def backend(self) -> BackendName:
        return backend_of(self.device)

    def move_to(self, backend: BackendName) -> Self:
        """Move all weights to a backend; returns the model. ValueError while anything computes with them."""
        return self if backend == self.backend else self.to(torch_device(backend))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What every move and conversion of torch goes through."""
        with self.activity.lock:
            self.activity.refuse("move the model", "graph", "optimizer", "session")
            return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a live model cannot be copied; capture a ModelSnapshot and build another from it")

    def projections(self) -> Iterator[tuple[str, Linear]]:
        """Every linear layer with its name, in the order of initialisation, adapters and NF4 packing."""
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                yield name, module

    def base_parameters(self) -> ParameterList:
        """The bundle's parameters by name, in the bundle's order, without adapters and packed weights."""
        return ParameterList(self, "base list", self._named(adapters=False))

    def adapter_parameters(self) -> ParameterList:
        """The adapter's parameters by name, A before B, projection by projection. ValueError without LoRA."""
        if self.lora is None:
            raise ValueError("there is no LoRA adapter; attach_lora comes first")
        return ParameterList(self, "adapter list", self._named(adapters=True))

    def _named(self, *, adapters: bool) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if (".lora_" in name) == adapters}

    def _freeze_base(self) -> None:
        for parameter in self._named(adapters=False).values():
            parameter.grad = None
            parameter.requires_grad_(False)

    def quantize_nf4(
        self, block_size: int = 64, *, double_quantization: bool = True, scale_block_size: int = 256
    ) -> None:
        """Pack the weight of every linear layer into 4 bits and freeze the rest; all or nothing.

        Once per model and before LoRA. ValueError for sizes that NF4 does not have, for weights that are not
        finite, and while anything relies on the model (`riftco.model.activity`).
        """
        with self.activity.lock:
            if self.quantized or self.lora is not None or self.lora_merged:
                raise ValueError("a model is quantized once, before LoRA; open the base bundle again")
            kinds: tuple[Kind, ...] = ("graph", "optimizer", "base list", "adapter list", "session")
            self.activity.refuse("quantize the model", *kinds)
            nf4.pack(dict(self.projections()), block_size, double_quantization, scale_block_size)
            self._freeze_base()
            self.quantized = True

    def quantized_memory(self) -> nf4.QuantizedMemory:
        """What the packed weights take; all zeros without any."""
        return nf4.QuantizedMemory.of(linear.packed for _, linear in self.projections() if linear.packed)

    def packed_state(self) -> tuple[PackedNf4Weight, ...]:
        """The packed weights in the order of the projections, as a checkpoint holds them; none if dense."""
        return tuple(nf4.stored(linear.packed) for _, linear in self.projections() if linear.packed)

    def load_packed_state(self, weights: Sequence[PackedNf4Weight]) -> None:
        """Replace every packed weight; their block sizes and kinds of scales may be others.

        ValueError, before any change, for another number of weights or other shapes.
        """
        with self.activity.lock:
            self.activity.refuse("load packed state", "graph", "session")
            nf4.load([linear for _, linear in self.projections()], weights)

    def load_base_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the base parameters to values of the same names, in the same order, of the same shapes.

        Below adapters, their own optimizer may be alive. ValueError, before any change, for values that do
        not fit or are not finite.
        """
        operation = "load parameter values" if self.lora is None else "load frozen base values"
        with self.activity.lock:
            self.activity.refuse(operation, "graph", "session")
            if self.lora is None or not self.activity.only_optimizer_is_of(
                self._named(adapters=True).values()
            ):
                self.activity.refuse(operation, "optimizer")
            copy_values(tensors, self._named(adapters=False))

    def attach_lora(self, config: LoraConfig) -> None:
        """Attach fresh adapters and freeze the rest; once per model. ValueError if a rank does not fit."""
        with self.activity.lock:
            if self.lora is not None or self.lora_merged:
                error = RuntimeError if self.lora_merged else ValueError
                raise error("LoRA is attached once per model; open the base bundle again for a new adapter")
            self.activity.refuse("attach LoRA", "graph", "optimizer", "session")
            targets = {n: linear for n, linear in self.projections() if _target(n) in config.targets}
            lora.attach(targets, config)
            self._freeze_base()
            self.lora = config

    def merge_lora(self) -> None:
        """Fold the adapters into their weights, and make packed weights float32 again; all or nothing.

        ValueError without adapters, and while anything relies on them (`riftco.model.activity`).
        """
        with self.activity.lock:
            if self.lora is None:
                raise ValueError("there is no LoRA adapter to merge; attach_lora comes first")
            self.activity.refuse("merge LoRA", "graph", "optimizer", "adapter list", "session")
            lora.merge(dict(self.projections()))
            self.requires_grad_(True)
            self.quantized, self.lora, self.lora_merged = False, None, True


def _target(projection: str) -> str:
    """The adapter target a projection belongs to: its name without its block."""
    return projection.split(".", 2)[-1] if projection.startswith("blocks.") else projection
