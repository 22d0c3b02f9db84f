"""Hugging Face transformers: GPT-2 of the same dimensions, `generate` with its cache of keys and values."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.serving_peers.work import (
    BLOCKS,
    CONTEXT,
    HEADS,
    INNER,
    VOCABULARY,
    WIDTH,
    Generate,
    gpt2_tensors,
)


def model(folder: Path) -> Any:
    """A `GPT2LMHeadModel` with the benchmark's weights, float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=BLOCKS,
        n_head=HEADS,
        n_inner=INNER,
        activation_function="gelu",
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    made: Any = GPT2LMHeadModel(config)
    tensors = {name: torch.from_numpy(x) for name, x in gpt2_tensors(folder).items()}
    state = {
        name if name.startswith("lm_head") else f"transformer.{name}": x.T if _is_transposed(name) else x
        for name, x in tensors.items()
    }
    made.load_state_dict(state)
    return made.eval()


def _is_transposed(name: str) -> bool:
    return ".c_" in name and name.endswith("weight")


@torch.inference_mode()
def load(folder: Path, variant: str, threads: int) -> Generate:
    """`variant`: float32 or bfloat16."""
    torch.set_num_threads(threads)
    made = model(folder).to(getattr(torch, variant))

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False}
        found: list[list[int]] = made.generate(ids, **options)[:, ids.shape[1] :].tolist()
        return found

    return generate
