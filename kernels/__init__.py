"""The mathematics of the model, fast: one folder per operation, plain functions as the public interface.

Shapes: B batch, H heads, T tokens, n new tokens, d head width, P pages.
"""

from kernels.flash_attention import flash_attention, materialized_attention
from kernels.paged_attention import paged_attention

__all__ = ["flash_attention", "materialized_attention", "paged_attention"]
