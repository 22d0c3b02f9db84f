"""Testing Triton kernels without a GPU: run them interpreted, watch their memory, compile them anywhere.

`interpret()` runs decorated kernels on CPU tensors, with the bf16 arithmetic of a GPU, which Triton's own
interpreter gets wrong. `sanitize()` adds errors for accesses out of bounds, 32-bit overflow and two programs
storing to one address. `compile_for(target)` compiles the launches that a Python wrapper makes on meta
tensors. `resources(kernel)` reads registers, spills and shared memory from the result.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter, jit
from triton.runtime.autotuner import Autotuner

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder
Edit = tuple[Any, str, Any]


class KernelMemoryError(RuntimeError):
    """A kernel touched memory it must not touch."""


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Run launches of Triton kernels in Python, on CPU tensors; nothing of it is left afterwards."""

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        return _interpreted(self.fn).run(*arguments, grid=grid, warmup=warmup, **options)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return _interpreted(self.fn)(*arguments, **options)

    def first_configuration(self: Any, *arguments: Any, **options: Any) -> Any:
        return self.fn.run(*arguments, **{**options, **self.configs[0].all_kwargs()})

    _import_kernels()
    edits = [
        (jit.JITFunction, "run", run),
        (jit.JITFunction, "__call__", call),
        (Autotuner, "run", first_configuration),
        *_bf16_edits(),
        # once, for kernels and Triton's own functions, where the interpreter would at each call of a function
        (interpreter, "_patch_lang", lambda function: SimpleNamespace(restore=lambda: None)),
    ]
    patch_language = interpreter._patch_lang
    with triton.knobs.runtime.scope(), triton.knobs.compilation.scope():
        triton.knobs.runtime.interpret = True
        triton.knobs.compilation.front_end_debugging = True  # errors come out as they are
        with _edited(*edits), _language_restored():
            patch_language(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            yield


@contextlib.contextmanager
def sanitize() -> Iterator[None]:
    """`interpret`, with KernelMemoryError or AssertionError for what a GPU would do wrong in silence."""
    builder = interpreter.interpreter_builder
    options = builder.options
    if options.debug:  # within another one
        yield
        return
    watch = _Watch()
    load, store, atomic = Builder.create_masked_load, Builder.create_masked_store, Builder.create_atomic_rmw
    prepare = interpreter.GridExecutor._init_args_hst

    def watched_prepare(self: Any, arguments: Any, options: Any) -> Any:
        host = prepare(self, arguments, options)
        watch.begin(self.fn.__name__, [*host[0], *host[1].values()])
        return host

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        watch.check(self, pointers, mask, "load")
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.own(self, watch.check(self, pointers, mask, "store"))
        return store(self, pointers, value, mask, *rest)

    def watched_atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.check(self, pointers, mask, "atomic")
        return atomic(self, operation, pointers, value, mask, *rest)

    edits = [
        (Builder, "create_masked_load", watched_load),
        (Builder, "create_masked_store", watched_store),
        (Builder, "create_atomic_rmw", watched_atomic),
        (interpreter.GridExecutor, "_init_args_hst", watched_prepare),
    ]
    builder.options = dataclasses.replace(options, debug=True, sanitize_overflow=True)
    try:
        with interpret(), _edited(*edits):
            yield
    finally:
        builder.options = options


class _Watch:
    """The memory that a launch may touch, and which program stored where."""

    def begin(self, name: str, arguments: list[Any]) -> None:
        self.name, self.owner = name, {}
        merged: list[list[int]] = []
        for low, high in sorted(_spans(arguments)):
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(high, merged[-1][1])
            else:
                merged.append([low, high])
        self.low = np.array([low for low, _ in merged], np.uint64)
        self.high = np.array([high for _, high in merged], np.uint64)

    def check(self, builder: Any, pointers: Any, mask: Any, what: str) -> np.ndarray:
        touched = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].ravel()
        if touched.size:
            size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
            span = np.searchsorted(self.low, touched, side="right") - 1
            outside = (span < 0) | (touched + size > self.high[np.maximum(span, 0)])
            if outside.any():
                where = f"program {builder.grid_idx}, {int(outside.sum())} lanes"
                raise KernelMemoryError(f"{self.name}: out-of-bounds {what}, {where}")
        return touched

    def own(self, builder: Any, addresses: np.ndarray) -> None:
        for address in addresses.tolist():
            first = self.owner.setdefault(address, builder.grid_idx)
            if first != builder.grid_idx:
                programs = f"programs {first} and {builder.grid_idx}"
                raise KernelMemoryError(f"{self.name}: {programs} store to one address without atomics")


def _spans(value: Any) -> list[tuple[int, int]]:
    """Address ranges of all tensors in the arguments of a launch."""
    if isinstance(value, tuple | list):
        return [span for item in value for span in _spans(item)]
    if isinstance(value, interpreter.TensorDescriptor):
        return _spans(value.base)
    if not hasattr(value, "data_ptr"):
        return []
    tensor = interpreter._unwrap_tensor(value)
    if not tensor.numel():
        return []
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return [(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())]


@contextlib.contextmanager
def compile_for(target: GPUTarget) -> Iterator[list[tuple[str, Any]]]:
    """Compile what is launched instead of running it; yields the list of (kernel name, compiled kernel).

    Launches are made on meta tensors, so that their specialisation is the real one. Every configuration of an
    autotuned kernel is compiled.
    """
    compiled: list[tuple[str, Any]] = []
    run = jit.JITFunction.run

    def warm_up(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        compiled.append((self.__name__, kernel))
        return kernel

    def every_configuration(self: Any, *arguments: Any, **options: Any) -> Any:
        for configuration in self.configs:
            result = self.fn.run(*arguments, **{**options, **configuration.all_kwargs()})
        return result

    active = driver._active
    driver.set_active(_Driver(target))
    try:
        with _edited((jit.JITFunction, "run", warm_up), (Autotuner, "run", every_configuration)):
            yield compiled
    finally:
        driver._active = active


class _Driver:
    """Stands for a GPU of the target where there is none."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return repr(self.target)  # the key of a kernel's cache of compiled variants

    def get_current_stream(self, device: Any = None) -> int:
        return 0


def resources(kernel: Any) -> dict[str, int]:
    """Registers a thread, spilled accesses, stack bytes, shared memory bytes and matrix instructions."""
    if "cubin" in kernel.asm:
        return _kept(kernel.asm["cubin"], lambda: _nvidia_resources(kernel))
    text = kernel.asm["amdgcn"]

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found, f"no {name} in the compiled kernel"
        return int(found[1])

    return {
        "registers": field("vgpr_count"),
        "spills": field("vgpr_spill_count"),
        "stack": field("private_segment_fixed_size"),
        "shared": kernel.metadata.shared,
        "matrix": len(re.findall(r"\bv_mfma", text)),
    }


def _kept(cubin: bytes, find: Callable[[], dict[str, int]]) -> dict[str, int]:
    """What was found for these bytes, kept beside them: NVIDIA's tools take longer than all else."""
    path = Path(triton.knobs.cache.dir) / f"{hashlib.sha256(cubin).hexdigest()}.resources.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(find(), file)
        os.replace(file.name, path)
    return json.loads(path.read_text())


def _nvidia_resources(kernel: Any) -> dict[str, int]:
    tools = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output(f"{tools}/cuobjdump", "-res-usage", file.name)
        code = _output(f"{tools}/nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return {
        "registers": int(found[1]),
        "spills": len(re.findall(r"\b(LDL|STL)", code)),
        "stack": int(found[2]),
        "shared": kernel.metadata.shared,
        "matrix": len(re.findall(r"\b(HMMA|HGMMA|UTCHMMA|UTCQMMA)", code)),
    }


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def _import_kernels() -> None:
    """Decorate every kernel now: one that is decorated under the interpreter stays interpreted for ever."""
    root = Path(__file__).parents[2]
    for path in sorted(root.glob("kernels/*/triton*.py")):
        importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


@functools.cache
def _interpreted(function: Callable[..., Any]) -> Any:
    return interpreter.InterpretedFunction(function)


@contextlib.contextmanager
def _edited(*edits: Edit) -> Iterator[None]:
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in edits]
    for owner, name, value in edits:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextlib.contextmanager
def _language_restored() -> Iterator[None]:
    """Undo what the interpreter does to `triton.language`, which would break a later compilation."""
    optional = [getattr(tl.core, name, None) for name in ("condition", "tensor_descriptor_base")]
    owners = [tl, tl.core, tl.math, tl.core.tensor, tl.core.dtype, *(owner for owner in optional if owner)]
    before = [(owner, dict(owner.__dict__)) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in before:
            for name in set(owner.__dict__) - set(attributes):
                delattr(owner, name)
            for name, value in attributes.items():
                if owner.__dict__[name] is not value:
                    setattr(owner, name, value)


# bf16 lives in the interpreter as bit patterns in uint16, on which numpy would do integer arithmetic. Each
# operation is widened to float32 and its result rounded to nearest, as GPUs do.


def _is_bf16(handle: Any) -> bool:
    return isinstance(handle, Handle) and handle.dtype.scalar == tl.bfloat16


def _widened(handle: Any) -> Any:
    if not _is_bf16(handle):
        return handle
    patterns = np.ascontiguousarray(handle.data).astype(np.uint32) << 16
    return Handle(patterns.view(np.float32).reshape(np.shape(handle.data)), tl.float32)


def _narrowed(handle: Any) -> Any:
    values = np.ascontiguousarray(handle.data, dtype=np.float32)
    patterns = values.view(np.uint32).astype(np.uint64)
    rounded = ((patterns + 0x7FFF + ((patterns >> 16) & 1)) >> 16).astype(np.uint16)
    return Handle(np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(values.shape), tl.bfloat16)


_COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
_BITWISE = {np.bitwise_and, np.bitwise_or, np.bitwise_xor}


def _bf16_edits() -> list[Edit]:
    stock = dict(Builder.__dict__)
    reduce_or_scan = interpreter.ReduceScanOpInterface
    apply = reduce_or_scan.apply

    def binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if not (_is_bf16(left) or _is_bf16(right)) or operation in _BITWISE:
            return stock["binary_op"](self, left, right, operation)
        result = operation(_widened(left).data, _widened(right).data)
        if operation in _COMPARISONS:
            return Handle(result, tl.bfloat16)
        return _narrowed(Handle(result, tl.float32))

    def unary(self: Any, value: Any, operation: Any) -> Any:
        result = stock["unary_op"](self, _widened(value), operation)
        return _narrowed(result) if _is_bf16(value) else result

    def dot(self: Any, left: Any, right: Any, accumulator: Any, *rest: Any) -> Any:
        return stock["create_dot"](self, _widened(left), _widened(right), accumulator, *rest)

    def cast(self: Any, value: Any, target: Any) -> Any:
        if _is_bf16(value) and target.scalar != tl.bfloat16:
            wide = _widened(value)
            return wide if target.scalar == tl.float32 else stock["cast_impl"](self, wide, target)
        if target.scalar == tl.bfloat16 and not _is_bf16(value):
            return _narrowed(Handle(value.data.astype(np.float32), tl.float32))
        return stock["cast_impl"](self, value, target)

    def float_cast(self: Any, value: Any, target: Any, rounding: Any) -> Any:
        kinds = (value.dtype.scalar, target.scalar)
        if tl.bfloat16 in kinds and set(kinds) <= {tl.bfloat16, tl.float32, tl.float16}:
            return cast(self, value, target)
        return stock["create_fp_to_fp"](self, value, target, rounding)

    def reduce(self: Any, value: Any) -> Any:
        if not (isinstance(value, tl.core.tensor) and value.dtype == tl.bfloat16):
            return apply(self, value)
        wide = tl.core.tensor(_widened(value.handle), tl.block_type(tl.float32, list(value.shape)))
        result = apply(self, wide)
        kind = result.type.with_element_ty(tl.bfloat16) if result.type.is_block() else tl.bfloat16
        return tl.core.tensor(_narrowed(result.handle), kind)

    def on_widened(name: str) -> Callable[..., Any]:
        def call(self: Any, *values: Any) -> Any:
            result = stock[name](self, *map(_widened, values))
            return _narrowed(result) if any(map(_is_bf16, values)) else result

        return call

    edits: list[Edit] = [
        (Builder, "binary_op", binary),
        (Builder, "unary_op", unary),
        (Builder, "create_dot", dot),
        (Builder, "cast_impl", cast),
        (Builder, "create_fp_to_fp", float_cast),
        (reduce_or_scan, "apply", reduce),
    ]
    others = ("create_clampf", "create_fma", "create_erf", "create_rsqrt")
    return edits + [(Builder, name, on_widened(name)) for name in others if name in stock]
