"""The model that is served, its random weights for every contender, and the works they are timed at."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WIDTH, HEADS, BLOCKS, INNER, CONTEXT, VOCABULARY = 256, 8, 6, 1024, 256, 4096
Floats = NDArray[np.float32]
Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Prompts and a number of tokens to those tokens, for each prompt."""


@dataclass(frozen=True)
class Work:
    """So many prompts at once, their length, and how many tokens follow each."""

    streams: int
    prompt: int
    new: int

    @property
    def tokens(self) -> int:
        """Generated in one turn."""
        return self.streams * self.new

    def prompts(self, turn: int) -> list[list[int]]:
        """Other random ids in each turn, so that no cache of prompts helps."""
        generator = np.random.default_rng([turn, self.streams, self.prompt])
        return [
            [int(i) for i in row] for row in generator.integers(VOCABULARY, size=(self.streams, self.prompt))
        ]


WORKS = {"one": Work(1, 16, 128), "sixteen": Work(16, 16, 112), "first": Work(1, 192, 1)}


def write_model(folder: Path) -> Path:
    """A bundle `model.rift` for us, and its tensors as `model.npz` for the others; returns the bundle's path.

    The head has no bias: GPT-2's has none.
    """
    from artifacts import ModelBundle, ModelConfig, TokenizerSpec

    config = ModelConfig(VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS, INNER)
    pairs = [(left, right) for left in range(32, 127) for right in range(32, 127)][: VOCABULARY - 256]
    merges = tuple((*pair, 256 + rank) for rank, pair in enumerate(pairs))
    tensors = random_tensors([(spec.name, spec.shape) for spec in config.parameter_specs()])
    np.savez(folder / "model.npz", **tensors)
    flat = np.concatenate([x.ravel() for x in tensors.values()])
    tokenizer = TokenizerSpec("bpe", merge_rules=merges)
    bundle = ModelBundle(config, tokenizer, config.parameter_specs(), flat, stage="benchmark")
    return bundle.save(folder / "model.rift")


def random_tensors(shapes: list[tuple[str, tuple[int, ...]]]) -> dict[str, Floats]:
    """Normal weights of variance 1/inputs, small biases, norms that are the identity."""
    generator = np.random.default_rng(0)

    def tensor(name: str, shape: tuple[int, ...]) -> Floats:
        if name == "language_model_head.bias" or "norm" in name:
            return np.full(shape, float(name.endswith("scale")), np.float32)
        scale = shape[-1] ** -0.5 if name.endswith("weight") else 0.02
        return generator.standard_normal(shape, np.float32) * np.float32(scale)

    return {name: tensor(name, shape) for name, shape in shapes}


def gpt2_tensors(folder: Path) -> dict[str, Floats]:
    """The tensors by the names of a GPT-2 checkpoint; matrices `[out, in]`, not GPT-2's `[in, out]`."""
    ours = np.load(folder / "model.npz")
    names = {
        "wte.weight": "token_embedding.weight",
        "wpe.weight": "position_embedding.weight",
        "ln_f.weight": "final_norm.scale",
        "ln_f.bias": "final_norm.bias",
        "lm_head.weight": "language_model_head.weight",
    }
    found = {theirs: ours[name] for theirs, name in names.items()}
    for block in range(BLOCKS):
        mine, his = f"blocks.{block}.", f"h.{block}."
        for norm, name in (("ln_1", "attention_norm"), ("ln_2", "feed_forward_norm")):
            found[f"{his}{norm}.weight"] = ours[f"{mine}{name}.scale"]
            found[f"{his}{norm}.bias"] = ours[f"{mine}{name}.bias"]
        for part in ("weight", "bias"):
            attention = [ours[f"{mine}attention.{name}.{part}"] for name in ("query", "key", "value")]
            found[f"{his}attn.c_attn.{part}"] = np.concatenate(attention)
            found[f"{his}attn.c_proj.{part}"] = ours[f"{mine}attention.output.{part}"]
            found[f"{his}mlp.c_fc.{part}"] = ours[f"{mine}feed_forward.expand.{part}"]
            found[f"{his}mlp.c_proj.{part}"] = ours[f"{mine}feed_forward.project.{part}"]
    return found
