"""Writing new keys and values into pages."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from kernels.dispatch import Operation
from kernels.native import Integer, Pointer, function, pointer
from kernels.operators import define

__all__ = ["kv_write"]

_native_write = function("riftco_kv_write", *[Pointer] * 4)


def kv_write(key_pages: Tensor, value_pages: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write N tokens into pages, in place: token i goes to offset slots[i] % page of page slots[i] // page.

    Pages are `[P, H, page, d]`, keys and values `[N, H, d]`, slots int64 `[N]`; all but slots of one dtype,
    all on one device. Slot -1 skips its token; the other slots must differ. Not differentiable. ValueError,
    with nothing written, for what does not fit and for pages that require gradients; on a GPU the values of
    slots are not looked at and a slot outside the pages is skipped.
    """
    _check(key_pages, value_pages, keys, values, slots)
    _kv_write(key_pages, value_pages, keys, values, slots)


def _check(key_pages: Tensor, value_pages: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    if key_pages.ndim != 4 or slots.ndim != 1:
        raise ValueError(
            "pages must be [P, H, page, d] and slots [N], "
            f"got {list(key_pages.shape)} and {list(slots.shape)}"
        )
    if key_pages.requires_grad or value_pages.requires_grad:
        raise ValueError("the pages require gradients, and writes have none: detach them")
    if slots.dtype != torch.int64 or slots.device != key_pages.device:
        raise ValueError(f"slots must be int64 on {key_pages.device}, got {slots.dtype} on {slots.device}")
    token = (slots.shape[0], key_pages.shape[1], key_pages.shape[3])
    expected = {
        "value_pages": (value_pages, key_pages.shape),
        "keys": (keys, token),
        "values": (values, token),
    }
    for name, (x, shape) in expected.items():
        if x.shape != shape or x.dtype != key_pages.dtype or x.device != key_pages.device:
            raise ValueError(
                f"{name} must be {key_pages.dtype} {list(shape)} on {key_pages.device}, "
                f"got {x.dtype} {list(x.shape)} on {x.device}"
            )


def _torch(key_pages: Tensor, value_pages: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    _refuse_misfits(key_pages, slots)
    kept = slots >= 0
    slots, page_size = slots[kept], key_pages.shape[2]
    where = (slots // page_size, slice(None), slots % page_size)
    key_pages[where] = keys[kept]
    value_pages[where] = values[kept]


def _native(key_pages: Tensor, value_pages: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Any:
    if key_pages.stride(3) != 1 or value_pages.stride(3) != 1:
        return NotImplemented
    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    slots = slots.contiguous()
    tensors = (key_pages, value_pages, keys, values)
    size = keys.element_size()
    sizes = (*keys.shape[:2], keys.shape[2] * size, key_pages.shape[2], key_pages.shape[0])
    strides = [stride * size for x in tensors[:2] for stride in x.stride()[:3]]
    strides += [stride * size for x in tensors[2:] for stride in (*x.stride()[:2], 0)]
    misfit = _native_write(  # type: ignore[misc]
        (Integer * len(sizes))(*sizes),
        (Pointer * len(tensors))(*(x.data_ptr() for x in tensors)),
        pointer(slots),
        (Integer * len(strides))(*strides),
    )
    if misfit:
        _refuse_misfits(key_pages, slots)
    return None


def _refuse_misfits(key_pages: Tensor, slots: Tensor) -> None:
    count = key_pages.shape[0] * key_pages.shape[2]
    outside = slots[(slots < -1) | (slots >= count)].tolist()
    if outside:
        raise ValueError(f"slots must be -1 or 0 to {count - 1}, the pages' last, got {outside[0]}")


def _triton(*arguments: Tensor) -> Any:
    from kernels.kv_write.triton_write import write

    return write(*arguments)


_write = Operation(
    "kv_write", torch=_torch, native=None if _native_write is None else _native, triton=_triton
)


def _write_and_mark(key_pages: Tensor, value_pages: Tensor, *rest: Tensor) -> None:
    _write(key_pages, value_pages, *rest)
    increment_version([x for x in (key_pages, value_pages) if not x.is_inference()])


def _fake(*_: Tensor) -> None:
    return None


_kv_write = define(
    "kv_write(Tensor(a!) key_pages, Tensor(b!) value_pages, Tensor keys, Tensor values, Tensor slots) -> ()",
    _write_and_mark,
    fake=_fake,
)
