"""Hugging Face transformers (GPT-2 with the same layers), with peft for adapters, bitsandbytes for 4 bits."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.peers.work import LEARNING_RATE, RANK, VOCABULARY, Size, batches


def step(size: Size, method: str, variant: str) -> Callable[[], None]:
    """`variant`: fp32 or bf16 (autocast), and `compiled`."""
    model = _model(size, method)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if "compiled" in variant else model
    source = batches(size)

    def take() -> None:
        inputs, targets = next(source)
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in variant):
            loss = forward(input_ids=inputs, labels=inputs, shift_labels=targets).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return take


def _model(size: Size, method: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=size.context,
        n_embd=size.width,
        n_layer=size.blocks,
        n_head=size.heads,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    model: Any = GPT2LMHeadModel(config)
    if method == "full":
        return model
    from peft import LoraConfig, get_peft_model

    if method == "qlora":
        model = _packed(model)
    adapter = LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=method == "lora",
    )
    return get_peft_model(model, adapter)


def _packed(model: Any) -> Any:
    """The model as it comes from a folder with its weights in 4 bits."""
    import bitsandbytes  # noqa: F401 (says by itself that it is missing)
    from transformers import BitsAndBytesConfig, GPT2LMHeadModel

    options = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype="float32",
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return GPT2LMHeadModel.from_pretrained(
            folder, quantization_config=options, device_map="cpu", dtype=torch.float32
        )
