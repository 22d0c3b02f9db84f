"""A model's weights as the decode step takes them: names, shapes and what each kind rounds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from kernels.decode_step.int8 import Int8Weight
from kernels.nf4 import PackedNf4, dequantize_nf4, quantize_nf4

Kind = Literal["float32", "bfloat16", "int8", "nf4"]
Matrix = Tensor | Int8Weight | PackedNf4
Tensors = Mapping[str, Tensor | PackedNf4]

_EMBEDDINGS = ("token_embedding.weight", "position_embedding.weight")
_NORMS = ("attention_norm", "feed_forward_norm")
_LINEARS = (
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.output",
    "feed_forward.expand",
    "feed_forward.project",
)


class Norm(NamedTuple):
    """Scale and bias `[D]`."""

    scale: Tensor
    bias: Tensor


class Linear(NamedTuple):
    """A weight `[out, in]` and its bias `[out]`."""

    weight: Matrix
    bias: Tensor


@dataclass(frozen=True, slots=True)
class Block:
    """The tensors of one block, as their names in the bundle say."""

    attention_norm: Norm
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    feed_forward_norm: Norm
    expand: Linear
    project: Linear


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """All tensors of a model; D width, V vocabulary, C context, F feed-forward width."""

    token_embedding: Tensor  # [V, D]
    position_embedding: Tensor  # [C, D]
    blocks: tuple[Block, ...]
    final_norm: Norm
    head: Linear
    head_count: int
    epsilon: float

    @classmethod
    def collect(
        cls, tensors: Tensors, head_count: int, epsilon: float, kind: Kind | None, *, copy: bool = False
    ) -> "PlainWeights":
        """Sort a bundle's tensors by name, rounding matrices to `kind` (None: as they are).

        All but matrices are copied, and with `copy` these too, save what is packed.
        ValueError for names that are missing or unknown and for shapes or devices that do not fit.
        """
        if kind is not None and kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
        block_count = max(1, *(1 + _block_number(name) for name in tensors))
        _require_names(tensors, block_count)
        sizes = _sizes(tensors)
        _require_shapes(tensors, sizes, block_count)
        width = sizes["D"]
        if head_count < 1 or width % head_count:
            raise ValueError(
                f"{head_count} heads do not divide the width {width}; give the model's own head_count"
            )
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise ValueError(f"the norms' epsilon must be finite and positive, got {epsilon}")

        def floats(name: str) -> Tensor:
            return _floats(tensors[name], kind)

        def linear(name: str) -> Linear:
            return Linear(_rounded(tensors[f"{name}.weight"], kind, copy), floats(f"{name}.bias"))

        def norm(name: str) -> Norm:
            return Norm(floats(f"{name}.scale"), floats(f"{name}.bias"))

        def block(prefix: str) -> Block:
            attention_norm, feed_forward_norm = (norm(prefix + name) for name in _NORMS)
            query, key, value, output, expand, project = (linear(prefix + name) for name in _LINEARS)
            return Block(attention_norm, query, key, value, output, feed_forward_norm, expand, project)

        token_embedding, position_embedding = map(floats, _EMBEDDINGS)
        return cls(
            token_embedding,
            position_embedding,
            tuple(block(f"blocks.{number}.") for number in range(block_count)),
            norm("final_norm"),
            linear("language_model_head"),
            head_count,
            epsilon,
        )


def dequantized(weight: Matrix) -> Tensor:
    """The weight's values as a tensor `[out, in]`."""
    if isinstance(weight, Int8Weight):
        return weight.dequantize()
    return dequantize_nf4(weight) if isinstance(weight, PackedNf4) else weight


def device_of(tensors: Tensors) -> torch.device:
    """Where the first tensor lies, and with it the others, as `PlainWeights.collect` makes sure."""
    return next(map(_device, tensors.values()), torch.device("cpu"))


def _block_number(name: str) -> int:
    part = name.split(".")[1] if name.startswith("blocks.") else ""
    return int(part) if part.isdecimal() else -1


def _shapes(block_count: int) -> dict[str, str]:
    """The dimensions of every tensor by its name in the bundle."""
    inner = {
        "feed_forward.expand.weight": "FD",
        "feed_forward.expand.bias": "F",
        "feed_forward.project.weight": "DF",
    }
    block = {f"{norm}.{part}": "D" for norm in _NORMS for part in ("scale", "bias")}
    block |= (
        {f"{name}.weight": "DD" for name in _LINEARS} | {f"{name}.bias": "D" for name in _LINEARS} | inner
    )
    blocks = {f"blocks.{n}.{name}": shape for n in range(block_count) for name, shape in block.items()}
    ends = {"final_norm.scale": "D", "final_norm.bias": "D"}
    ends |= {"language_model_head.weight": "VD", "language_model_head.bias": "V"}
    return dict(zip(_EMBEDDINGS, ("VD", "CD"), strict=True)) | blocks | ends


def _require_names(tensors: Tensors, block_count: int) -> None:
    expected = _shapes(block_count).keys()
    missing, unknown = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
    if missing:
        raise ValueError(
            f"the weights lack {missing[0]!r} (and {len(missing) - 1} more); give all of a bundle"
        )
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no tensor of a bundle; merge adapters before preparing weights")


def _sizes(tensors: Tensors) -> dict[str, int]:
    vocabulary, width = tensors[_EMBEDDINGS[0]].shape
    inner, _ = tensors["blocks.0.feed_forward.expand.weight"].shape
    return {"V": vocabulary, "C": tensors[_EMBEDDINGS[1]].shape[0], "D": width, "F": inner}


def _require_shapes(tensors: Tensors, sizes: dict[str, int], block_count: int) -> None:
    device = _device(tensors[_EMBEDDINGS[0]])
    for name, letters in _shapes(block_count).items():
        tensor, shape = tensors[name], tuple(sizes[letter] for letter in letters)
        if tuple(tensor.shape) != shape or _device(tensor) != device:
            raise ValueError(
                f"{name} must be {list(shape)} on {device} as the embeddings say, "
                f"got {list(tensor.shape)} on {_device(tensor)}"
            )


def _device(tensor: Tensor | PackedNf4) -> torch.device:
    return tensor.codes.device if isinstance(tensor, PackedNf4) else tensor.device


def _floats(tensor: Tensor | PackedNf4, kind: Kind | None) -> Tensor:
    if isinstance(tensor, PackedNf4):
        raise ValueError("only the weights of linear layers may be packed to NF4; dequantize the others")
    dtype = tensor.dtype if kind is None else torch.float32
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def _rounded(weight: Tensor | PackedNf4, kind: Kind | None, copy: bool) -> Matrix:
    if isinstance(weight, PackedNf4):
        if kind in (None, "nf4"):
            return weight
        weight = dequantize_nf4(weight)
    weight = weight.detach()
    if kind == "nf4":
        return quantize_nf4(weight.float().contiguous())
    if kind == "int8":
        return Int8Weight.quantize(weight.float())
    dtypes = {None: weight.dtype, "bfloat16": torch.bfloat16, "float32": torch.float32}
    return weight.to(dtypes[kind], copy=copy, memory_format=torch.contiguous_format)
