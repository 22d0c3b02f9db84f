"""llama.cpp through llama-cpp-python's bindings of its C interface: a batch a step, its own greedy sampler.

The GGUF file is written with the `gguf` package; types other than float32 are of the matrices only.
"""

from pathlib import Path
from typing import Any

import numpy as np

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

_MOST_STREAMS = 16
_NAMES = {"ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output"}
_NAMES |= {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
_ENDS = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"}


def load(folder: Path, variant: str, threads: int) -> Generate:
    """`variant`: a GGUF type: F32, BF16, Q8_0 or Q4_0."""
    import llama_cpp

    file = folder / f"{variant}.gguf"
    if not file.exists():
        _write(folder, file, variant)
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp does not load {file.name}")
    contexts = {streams: _Context(llama_cpp, model, streams, threads) for streams in (1, _MOST_STREAMS)}

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        return contexts[len(prompts)].generate(prompts, new)

    generate.alive = quiet  # type: ignore[attr-defined]
    return generate


class _Context:
    """Room for a number of sequences, and the batch that steps them."""

    def __init__(self, api: Any, model: Any, streams: int, threads: int) -> None:
        self.api = api
        params = api.llama_context_default_params()
        params.n_ctx = CONTEXT * streams
        params.n_seq_max = streams
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        self.context = api.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no context for {streams} sequences")
        self.batch = api.llama_batch_init(512, 0, 1)
        self.sampler = api.llama_sampler_init_greedy()

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Prefill in one batch, then one batch of a token for each sequence per step."""
        api, size = self.api, len(prompts[0])
        api.llama_memory_clear(api.llama_get_memory(self.context), False)
        ids: list[list[int]] = [[] for _ in prompts]
        tokens = [(token, at, s) for s, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
        for step in range(new):
            if step:
                tokens = [(row[-1], size + step - 1, s) for s, row in enumerate(ids)]
            last = size - 1 if not step else size + step - 1
            rows = self._decode(tokens, last)
            for row, at in zip(ids, rows, strict=True):
                row.append(api.llama_sampler_sample(self.sampler, self.context, at))
        return ids

    def _decode(self, tokens: list[tuple[int, int, int]], last: int) -> list[int]:
        """Run a batch; returns which of its entries have logits: those at position `last`."""
        batch, rows = self.batch, []
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, position == last
            if position == last:
                rows.append(i)
        code = self.api.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        return rows


def _write(folder: Path, file: Path, variant: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(file, "gpt2")
    writer.add_block_count(BLOCKS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")
    kind = gguf.GGMLQuantizationType[variant]
    for name, values in gpt2_tensors(folder).items():
        is_matrix = values.ndim == 2 and not name.startswith("w")
        type_ = kind if is_matrix else gguf.GGMLQuantizationType.F32
        data = np.ascontiguousarray(values)
        packed = data if type_ == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(data, type_)
        writer.add_tensor(_gguf_name(name), packed, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    stem, _, part = name.rpartition(".")
    if not stem.startswith("h."):
        return f"{_ENDS[stem]}.{part}"
    _, block, rest = stem.split(".", 2)
    return f"blk.{block}.{_NAMES[rest]}.{part}"
