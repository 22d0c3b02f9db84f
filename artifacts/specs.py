"""What an artifact says about a model: dimensions, tokenizer state, names and shapes of its parameters.

Plain values without behaviour: the live model and tokenizer are built from them elsewhere. Their JSON forms
are those of a bundle's manifest.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Self

from artifacts.checks import positive_float32, require_integer, require_keys

_Shapes = list[tuple[str, tuple[int, ...]]]

_MAXIMUM_SIZE = 2**32


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Name and shape of one tensor."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless the name is a text and every dimension a positive integer."""
        if not isinstance(self.name, str):
            raise TypeError(f"parameter name must be a text, got {self.name!r}")
        if not self.name:
            raise ValueError("parameter name must not be empty")
        object.__setattr__(self, "shape", tuple(self.shape))
        for dimension in self.shape:
            require_integer(f"shape of {self.name}", dimension, 1, None)

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def parameters_json(parameters: Iterable[ParameterSpec]) -> list[dict[str, Any]]:
    """The array of a manifest: names, shapes, counts and where each tensor's values begin, in elements."""
    content, offset = [], 0
    for spec in parameters:
        content.append({"name": spec.name, "shape": list(spec.shape), "offset": offset, "count": spec.count})
        offset += spec.count
    return content


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions of a decoder-only transformer; the random seed is the one its weights were drawn with."""

    vocabulary_size: int
    maximum_context: int
    model_width: int
    head_count: int
    block_count: int
    feed_forward_width: int
    random_seed: int = 5489
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        """Raise TypeError for a wrong type (bool is not an integer) and ValueError for a wrong value."""
        for name in ("vocabulary_size", "maximum_context"):
            require_integer(name, getattr(self, name), 1, _MAXIMUM_SIZE)
        for name in ("model_width", "head_count", "block_count", "feed_forward_width"):
            require_integer(name, getattr(self, name), 1, None)
        require_integer("random_seed", self.random_seed, 0, 2**32 - 1)
        if self.model_width % self.head_count:
            raise ValueError(
                f"model_width {self.model_width} is not a multiple of head_count {self.head_count}"
            )
        positive_float32("layer_norm_epsilon", self.layer_norm_epsilon)
        object.__setattr__(self, "layer_norm_epsilon", float(self.layer_norm_epsilon))

    def parameter_specs(self) -> tuple[ParameterSpec, ...]:
        """Names and shapes of all tensors in bundle order; linear weights are [output, input]."""
        V, D = self.vocabulary_size, self.model_width
        specs: _Shapes = [
            ("token_embedding.weight", (V, D)),
            ("position_embedding.weight", (self.maximum_context, D)),
        ]
        for block in range(self.block_count):
            specs += [(f"blocks.{block}.{name}", shape) for name, shape in self._block_specs()]
        specs += [("final_norm.scale", (D,)), ("final_norm.bias", (D,))]
        specs += [("language_model_head.weight", (V, D)), ("language_model_head.bias", (V,))]
        return tuple(ParameterSpec(name, shape) for name, shape in specs)

    def _block_specs(self) -> _Shapes:
        D, F = self.model_width, self.feed_forward_width
        specs: _Shapes = [("attention_norm.scale", (D,)), ("attention_norm.bias", (D,))]
        for projection in ("query", "key", "value", "output"):
            specs += [(f"attention.{projection}.weight", (D, D)), (f"attention.{projection}.bias", (D,))]
        specs += [("feed_forward_norm.scale", (D,)), ("feed_forward_norm.bias", (D,))]
        specs += [("feed_forward.expand.weight", (F, D)), ("feed_forward.expand.bias", (F,))]
        specs += [("feed_forward.project.weight", (D, F)), ("feed_forward.project.bias", (D,))]
        return specs

    def to_json(self) -> dict[str, Any]:
        """The `config` object of a manifest."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The config in a manifest; TypeError or ValueError unless it is an object of exactly the 8 keys."""
        require_keys("config", value, {field.name for field in fields(cls)})
        if type(value["layer_norm_epsilon"]) is not float:
            raise TypeError(
                f"config.layer_norm_epsilon must be written as a float, got {value['layer_norm_epsilon']!r}"
            )
        return cls(**value)


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """State of a tokenizer: `byte` lists bytes in id order, `bpe` merges (left, right, result) by rank."""

    method: str
    byte_vocabulary: tuple[int, ...] | None = None
    merge_rules: tuple[tuple[int, int, int], ...] | None = None

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a state that no tokenizer can have."""
        if self.method == "byte":
            if self.merge_rules:
                raise ValueError("a byte tokenizer has no merge_rules")
            object.__setattr__(self, "byte_vocabulary", _checked_bytes(self.byte_vocabulary or ()))
            object.__setattr__(self, "merge_rules", None)
        elif self.method == "bpe":
            if self.byte_vocabulary:
                raise ValueError("a bpe tokenizer has no byte_vocabulary: it knows all 256 bytes")
            object.__setattr__(self, "merge_rules", _checked_merges(self.merge_rules or ()))
            object.__setattr__(self, "byte_vocabulary", None)
        else:
            raise ValueError(f"tokenizer method must be 'byte' or 'bpe', got {self.method!r}")

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return len(self.byte_vocabulary) if self.byte_vocabulary else 256 + len(self.merge_rules or ())

    def to_json(self) -> dict[str, Any]:
        """The `tokenizer` object of a manifest."""
        if self.byte_vocabulary:
            return {"method": self.method, "byte_vocabulary": list(self.byte_vocabulary)}
        return {"method": self.method, "merge_rules": [list(rule) for rule in self.merge_rules or ()]}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The state in a manifest's `tokenizer` object; TypeError or ValueError unless it is exactly one."""
        method = value.get("method") if isinstance(value, dict) else None
        state = "merge_rules" if method == "bpe" else "byte_vocabulary"
        require_keys("tokenizer", value, {"method", state})
        if not isinstance(value[state], list):
            raise TypeError(f"tokenizer.{state} must be an array, got {value[state]!r}")
        return cls(**value)


def _checked_bytes(vocabulary: Iterable[int]) -> tuple[int, ...]:
    checked = tuple(vocabulary)
    for byte in checked:
        require_integer("byte_vocabulary entry", byte, 0, 255)
    if not checked:
        raise ValueError("byte_vocabulary must list at least one byte")
    if len(set(checked)) != len(checked):
        raise ValueError("byte_vocabulary lists a byte twice")
    return checked


def _checked_merges(rules: Iterable[Iterable[int]]) -> tuple[tuple[int, int, int], ...]:
    checked = tuple(_checked_merge(256 + rank, rule) for rank, rule in enumerate(rules))
    if len({rule[:2] for rule in checked}) != len(checked):
        raise ValueError("merge_rules merge a pair twice")
    return checked


def _checked_merge(expected: int, rule: Iterable[int]) -> tuple[int, int, int]:
    values = tuple(rule)
    if len(values) != 3:
        raise ValueError(f"merge rule must be (left, right, result), got {values}")
    left, right, result = values
    require_integer("merge rule result", result, expected, expected)
    require_integer("merge rule left id", left, 0, expected - 1)
    require_integer("merge rule right id", right, 0, expected - 1)
    return left, right, result
