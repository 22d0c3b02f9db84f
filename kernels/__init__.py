"""The mathematics of the model, fast: one folder per operation, plain functions as the public interface.

Shapes: B batch, H heads, T tokens, n new tokens, d head width, P pages.
"""

from kernels.adam import NonFiniteUpdateError, adam_step
from kernels.cross_entropy import cross_entropy, linear_cross_entropy
from kernels.decode_step import DecodeStep, DecodeWeights, decode_step
from kernels.flash_attention import flash_attention, materialized_attention
from kernels.gelu import gelu
from kernels.kv_write import kv_write
from kernels.layer_norm import layer_norm
from kernels.linear import feed_forward, half_operand, linear
from kernels.linear.qkv import qkv_linear
from kernels.lora_linear import lora_linear
from kernels.nf4 import PackedNf4, dequantize_nf4, nf4_linear, quantize_nf4
from kernels.operands import Operands
from kernels.operators import flop_counter
from kernels.orthogonalize import orthogonalize
from kernels.paged_attention import paged_attention
from kernels.sampling import greedy, sample

__all__ = [
    "DecodeStep",
    "DecodeWeights",
    "NonFiniteUpdateError",
    "Operands",
    "PackedNf4",
    "adam_step",
    "cross_entropy",
    "decode_step",
    "dequantize_nf4",
    "feed_forward",
    "flash_attention",
    "flop_counter",
    "gelu",
    "greedy",
    "half_operand",
    "kv_write",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "lora_linear",
    "materialized_attention",
    "nf4_linear",
    "orthogonalize",
    "paged_attention",
    "qkv_linear",
    "quantize_nf4",
    "sample",
]
