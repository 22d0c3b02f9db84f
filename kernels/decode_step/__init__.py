"""One step of decoding on the CPU, from token ids to logits, in one native call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.decode_step import cpu, reference
from kernels.decode_step.weights import Kind, PlainWeights, Tensors, device_of
from kernels.dispatch import Operation

__all__ = ["DecodeStep", "DecodeWeights", "decode_step"]

_INTEGERS = (torch.int32, torch.int64)


class DecodeWeights:
    """A model's weights made ready for `decode_step`. They do not follow later changes of the model."""

    def __init__(self, kind: Kind, plain: PlainWeights, panels: cpu.Panels | None) -> None:
        """From tensors already collected, and packed if steps run in native code; use `prepare`."""
        self.kind = kind
        self.vocabulary_size, self.width = plain.token_embedding.shape
        self.maximum_context = len(plain.position_embedding)
        self.block_count = len(plain.blocks)
        self.head_count = plain.head_count
        self.device = plain.token_embedding.device
        self.panels = panels
        self.plain = plain if panels is None else None

    @property
    def is_native(self) -> bool:
        """Whether steps run in native code, whose results for a row do not depend on the other rows."""
        return self.panels is not None

    @classmethod
    def prepare(
        cls, tensors: Tensors, *, head_count: int, layer_norm_epsilon: float = 1e-5, kind: Kind = "float32"
    ) -> "DecodeWeights":
        """Pack a bundle's tensors, by their names there; linear weights may already be `PackedNf4`.

        kind: what linear weights are stored as, "float32", "bfloat16" (rounded), "int8" (`Int8Weight`) or
        "nf4" (quantised by `quantize_nf4` unless they already are; rows of which no block holds a multiple of
        4 stay float32). Everything else is float32, and so is all arithmetic, save that the native code
        multiplies bfloat16 and NF4 weights in 16-bit fixed point, ten times closer than bfloat16 products,
        and int8 ones with inputs of 8 bits, about as close as these. Everything is copied: the tensors may be
        views of a file that changes. ValueError for names, shapes and devices that do not fit.
        """
        packs = _step.order(device_of(tensors))[0] == "native"
        rounds = packs and kind in ("bfloat16", "int8")  # packing does, without a copy in between
        kept: Kind = "float32" if rounds else kind
        plain = PlainWeights.collect(tensors, head_count, layer_norm_epsilon, kept, copy=not packs)
        return cls(kind, plain, cpu.Panels(plain, kind) if packs else None)


class DecodeStep:
    """A model's weights bound to the pages of its keys and values, for many calls; see `decode_step`.

    The pages' tensors are kept and written. ValueError for pages that do not fit.
    """

    def __init__(
        self, weights: DecodeWeights, key_pages: Sequence[Tensor], value_pages: Sequence[Tensor]
    ) -> None:
        _check_pages(weights, key_pages, value_pages)
        self.weights, self.key_pages, self.value_pages = weights, tuple(key_pages), tuple(value_pages)
        covered = weights.panels is not None and key_pages[0].dtype in (torch.float32, torch.bfloat16)
        self.native_pages = cpu.Pages(key_pages, value_pages) if covered else None

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        page_table: Tensor,
        needs_logits: Tensor | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """The logits after R rows, as `decode_step`."""
        count = _check_rows(self.weights, token_ids, positions, page_table, needs_logits)
        if not count:
            return token_ids.new_empty(0, self.weights.vocabulary_size, dtype=torch.float32)
        return _step(token_ids, self, positions, page_table, needs_logits, threads)


def decode_step(
    weights: DecodeWeights,
    token_ids: Tensor,
    positions: Tensor,
    page_table: Tensor,
    key_pages: Sequence[Tensor],
    value_pages: Sequence[Tensor],
    needs_logits: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Run R rows, each one new token of a sequence, and return the logits after them.

    token_ids, positions: int64 `[R]`. page_table: int32 or int64 `[R, max_pages]`; row i's position p lies in
    page `page_table[i, p // page]` at slot p % page. A sequence may have several rows, at different positions
    (a chunk of a prompt); its earlier positions must have been written before or be rows of this call. Pages:
    for each block one contiguous tensor `[P, H, page, d]`, float32 or bfloat16; the rows' keys and values are
    written there. needs_logits: bool `[R]`, which rows' logits are returned, all by default. Returns float32
    `[rows that need them, V]`, in the order of the rows. threads: at most so many, torch's number by default;
    fewer where the work is small. Not differentiable; the interpreter's lock is released meanwhile.

    The native implementation computes every row alone and each sum in a fixed order: a row's logits (and its
    keys and values) have the same bits whatever other rows are in the call, in whatever order, whether its
    sequence's earlier tokens came one by one or in chunks, with any number of threads and any page size. The
    fallback in torch does not promise this.

    ValueError for what does not fit, with nothing written; two rows that write one slot are the caller's
    error.
    """
    step = DecodeStep(weights, key_pages, value_pages)
    return step(token_ids, positions, page_table, needs_logits, threads)


def _check_rows(
    weights: DecodeWeights, token_ids: Tensor, positions: Tensor, page_table: Tensor, needs: Tensor | None
) -> int:
    count = token_ids.shape[0] if token_ids.ndim == 1 else -1
    rows = [("token_ids", token_ids, torch.int64), ("positions", positions, torch.int64)]
    if needs is not None:
        rows.append(("needs_logits", needs, torch.bool))
    for name, x, dtype in rows:
        if x.shape != (count,) or x.dtype != dtype or x.device != weights.device:
            raise ValueError(
                f"{name} must be {dtype} [R] on {weights.device}, one for each row, "
                f"got {x.dtype} {list(x.shape)} on {x.device}"
            )
    if page_table.ndim != 2 or page_table.shape[0] != count or page_table.dtype not in _INTEGERS:
        raise ValueError(
            f"page_table must be int32 or int64 [{count}, max_pages], "
            f"got {page_table.dtype} {list(page_table.shape)}"
        )
    if page_table.device != weights.device:
        raise ValueError(f"page_table must be on {weights.device}, got {page_table.device}")
    return count


def _check_pages(weights: DecodeWeights, key_pages: Sequence[Tensor], value_pages: Sequence[Tensor]) -> None:
    if len(key_pages) != weights.block_count or len(value_pages) != weights.block_count:
        raise ValueError(
            f"the model has {weights.block_count} blocks: give as many tensors of key and of value pages, "
            f"got {len(key_pages)} and {len(value_pages)}"
        )
    first = key_pages[0]
    shape, dtype, heads = first.shape, first.dtype, weights.head_count
    fits = len(shape) == 4 and shape[1] == heads and shape[2] and shape[3] * heads == weights.width
    if not fits or not dtype.is_floating_point:
        raise ValueError(
            f"pages must be floating-point [P, {heads}, page, {weights.width // heads}], "
            f"got {dtype} {list(shape)}"
        )
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        for block, x in enumerate(pages):
            if x.shape != shape or x.dtype != dtype or x.device != weights.device or not x.is_contiguous():
                raise ValueError(
                    f"{name}[{block}] must be contiguous {dtype} {list(shape)} on {weights.device} "
                    f"as the others, got {x.dtype} {list(x.shape)} with strides {x.stride()} on {x.device}"
                )


def _native(
    token_ids: Tensor,
    step: DecodeStep,
    positions: Tensor,
    page_table: Tensor,
    needs_logits: Tensor | None,
    threads: int | None,
) -> Any:
    weights, pages = step.weights, step.native_pages
    if weights.panels is None or pages is None:
        return NotImplemented
    rows = (token_ids, positions, page_table, needs_logits)
    logits = cpu.step(weights.panels, pages, *rows, threads or torch.get_num_threads())
    if logits is None:
        reference.refuse_misfits(weights.vocabulary_size, weights.maximum_context, token_ids, positions)
        reference.refuse_pages(page_table, positions, step.key_pages[0])
    return logits


def _torch(token_ids: Tensor, step: DecodeStep, positions: Tensor, page_table: Tensor, *rest: Any) -> Tensor:
    plain = step.weights.plain
    if plain is None:
        raise ValueError(
            "these weights were packed for native code with float32 or bfloat16 pages; prepare them under "
            "kernels.dispatch.use('torch') to run in torch"
        )
    needs_logits, _ = rest
    with torch.no_grad():
        return reference.step(
            plain, token_ids, positions, page_table, step.key_pages, step.value_pages, needs_logits
        )


_step = Operation("decode_step", torch=_torch, native=_native if cpu.built else None)
