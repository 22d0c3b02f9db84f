"""Writing new keys and values into pages.

Grid: axis 0 only, N ceil(H d / BLOCK) programs. A program owns BLOCK numbers of one token's keys and as
many of its values: reads 2 BLOCK numbers and writes them as they are, of any dtype. Nothing is computed.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def write(key_pages: Tensor, value_pages: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """As `kv_write`; slots outside the pages are skipped."""
    tokens, heads, width = keys.shape
    programs = tokens * triton.cdiv(heads * width, _BLOCK)
    if not programs:
        return
    _kv_write_kernel[(programs,)](
        key_pages,
        value_pages,
        keys,
        values,
        slots.contiguous(),
        *key_pages.stride(),
        *value_pages.stride(),
        *keys.stride(),
        *values.stride(),
        key_pages.shape[0],
        key_pages.shape[2],
        heads,
        width,
        BLOCK=_BLOCK,
    )


@triton.jit
def _kv_write_kernel(
    key_pages_ptr,
    value_pages_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    stride_kpp: tl.int64,
    stride_kph: tl.int64,
    stride_kpt: tl.int64,
    stride_kpd: tl.int64,
    stride_vpp: tl.int64,
    stride_vph: tl.int64,
    stride_vpt: tl.int64,
    stride_vpd: tl.int64,
    stride_kt: tl.int64,
    stride_kh: tl.int64,
    stride_kd: tl.int64,
    stride_vt: tl.int64,
    stride_vh: tl.int64,
    stride_vd: tl.int64,
    page_count: tl.int64,
    page_size,
    heads,
    width,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(heads * width, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    number = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    h, d = (number // width).to(tl.int64), number % width
    slot = tl.load(slots_ptr + token)
    if (slot < 0) | (slot >= page_count * page_size):
        return
    mask = number < heads * width
    page, offset = slot // page_size, slot % page_size
    key = tl.load(keys_ptr + token * stride_kt + h * stride_kh + d * stride_kd, mask=mask)
    value = tl.load(values_ptr + token * stride_vt + h * stride_vh + d * stride_vd, mask=mask)
    to_key = key_pages_ptr + page * stride_kpp + h * stride_kph + offset * stride_kpt + d * stride_kpd
    to_value = value_pages_ptr + page * stride_vpp + h * stride_vph + offset * stride_vpt + d * stride_vpd
    tl.store(to_key, key, mask=mask)
    tl.store(to_value, value, mask=mask)
