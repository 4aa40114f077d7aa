"""A kernel's text as a compiled program, launched over numpy arrays."""

import ctypes
import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..fault import KINDS, KernelFault
from ..rewrite import EMULATOR, LINE_STEP, Unsupported, rewrite
from ..text import KernelText
from . import compiler

MAX_THREADS = 1024
TEXT_NAME = "kernel.metal"
FLOAT_TYPES = (" float", " float16_t", " bfloat16_t", "<float>")


class Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("element", ctypes.c_uint32),
        ("role", ctypes.c_uint32),
        ("is_float", ctypes.c_uint32),
        ("constant", ctypes.c_uint32),
    ]


class Launch(ctypes.Structure):
    _fields_ = [
        ("buffers", ctypes.POINTER(Buffer)),
        ("count", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("fault", ctypes.c_uint32),
        ("line", ctypes.c_uint32),
        ("pc", ctypes.c_uint64),
        ("thread", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("restart", ctypes.c_uint32),
        ("counters", ctypes.c_uint64 * 64),
        ("message", ctypes.c_char * 512),
    ]


# What an attribute of the signature reads from the runtime's record of the thread.
ATTRIBUTE_VALUES = {
    "dispatch_quadgroups_per_threadgroup": "(t.dispatch_simdgroups * 8)",
    "dispatch_simdgroups_per_threadgroup": "t.dispatch_simdgroups",
    "dispatch_threads_per_threadgroup": "emu_uint3(t.dispatch_threads)",
    "grid_origin": "metal::uint3(0u)",
    "grid_size": "emu_uint3(t.threads_per_grid)",
    "quadgroup_index_in_threadgroup": "(t.index_in_group / 4)",
    "quadgroups_per_threadgroup": "(t.simdgroups * 8)",
    "simdgroup_index_in_threadgroup": "t.simdgroup",
    "simdgroups_per_threadgroup": "t.simdgroups",
    "thread_execution_width": "32u",
    "thread_index_in_quadgroup": "(t.lane % 4)",
    "thread_index_in_simdgroup": "t.lane",
    "thread_index_in_threadgroup": "t.index_in_group",
    "thread_position_in_grid": "emu_uint3(t.thread_in_grid)",
    "thread_position_in_threadgroup": "emu_uint3(t.thread_in_group)",
    "threadgroup_position_in_grid": "emu_uint3(t.group_in_grid)",
    "threadgroups_per_grid": "emu_uint3(t.groups_per_grid)",
    "threads_per_grid": "emu_uint3(t.threads_per_grid)",
    "threads_per_simdgroup": "32u",
    "threads_per_threadgroup": "emu_uint3(t.threads_per_group)",
}


def entry_point(text: KernelText) -> str:
    """The C++ function through which the runtime calls the kernel."""
    arguments, buffer = [], 0
    for parameter in text.parameters:
        if parameter.source == "attribute":
            arguments.append(ATTRIBUTE_VALUES[parameter.name])
            continue
        kind = parameter.declaration.rsplit(" ", 1)[0]
        if kind.endswith("&"):
            arguments.append(f"*({kind[:-1]}*)b[{buffer}]")
        else:
            arguments.append(f"({kind})b[{buffer}]")
        buffer += 1
    return (
        '\n#line 1 "entry"\n'
        "static inline metal::uint3 emu_uint3(const uint32_t* a) "
        "{ return metal::uint3(a[0], a[1], a[2]); }\n"
        'extern "C" void emu_entry(void* const* b, const emu_ids* ids) {\n'
        "  const emu_ids t = *ids;\n"
        f"  {text.function}({', '.join(arguments)});\n}}\n"
    )


@dataclass
class Result:
    """Outputs of a launch, its bytes of threadgroup memory and the runtime's counters."""

    outputs: list[np.ndarray]
    shared_bytes: int
    counters: list[int]


_locks: dict[Path, threading.Lock] = {}


class Program:
    """A compiled kernel. Its runtime has one state, so launches of it are taken in turn."""

    def __init__(self, name: str, text: KernelText, mode: str):
        self.name, self.text, self.mode = name, text, mode
        try:
            rewritten = rewrite(text.text, EMULATOR, TEXT_NAME)
        except Unsupported as error:
            kind = "limits" if "ASCII" in error.message else "unsupported"
            raise self.fault(kind, error.message, line=error.line) from None
        self.shared_names = rewritten.shared_names
        unit = f'#include "prelude.h"\n#line 1 "{TEXT_NAME}"\n{rewritten.text}{entry_point(text)}'
        try:
            self.path = compiler.build(unit, mode)
        except compiler.BuildFailed as error:
            raise self._compile_fault(str(error)) from None
        self.library = ctypes.CDLL(str(self.path))
        self.lock = _locks.setdefault(self.path, threading.Lock())

    def fault(
        self, kind: str, message: str, line: int = 0, thread: tuple[int, ...] | None = None
    ) -> KernelFault:
        """A KernelFault at a line of the generated text."""
        where = self.text.locate(line % LINE_STEP)
        return KernelFault(kind, self.name, message, thread=thread, **where)

    def _compile_fault(self, messages: str) -> KernelFault:
        found = re.findall(rf"{re.escape(TEXT_NAME)}:(\d+):\d+: (.*)", messages)
        errors = [(int(n), m) for n, m in found if "error:" in m]
        if errors:
            line, message = errors[0]
            return self.fault("unsupported", message.split("error:", 1)[1].strip(), line=line)
        first = next((m for m in messages.splitlines() if "error" in m), messages.strip()[:300])
        line = int(found[0][0]) if found else 0
        return self.fault("unsupported", first.split("error:", 1)[-1].strip(), line=line)

    def run(
        self,
        arrays: Sequence[np.ndarray],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        init_value: float | None = None,
    ) -> Result:
        """Run the kernel over numpy arrays. Raises KernelFault."""
        outputs = [
            aligned(np.empty(shape, dtype=storage(dtype)))
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        if init_value is not None:
            for out, dtype in zip(outputs, output_dtypes, strict=True):
                value = mx.array(init_value).astype(dtype)
                out[...] = to_numpy(value)
        keep, buffers = [], []
        for parameter in self.text.parameters:
            if parameter.source == "attribute":
                continue
            if parameter.source == "output":
                array, role = outputs[parameter.index], 1 if init_value is None else 2
            else:
                array, role = aligned(describe(arrays[parameter.index], parameter.source)), 0
            keep.append(array)
            made = Buffer(array.ctypes.data, extent(array), array.itemsize, role)
            made.is_float = any(t in parameter.declaration for t in FLOAT_TYPES)
            made.constant = " constant " in parameter.declaration
            buffers.append(made)
        job = Launch()
        job.buffers = (Buffer * max(len(buffers), 1))(*buffers)
        job.count = len(buffers)
        job.grid[:] = grid
        job.group[:] = [min(t, g) for t, g in zip(threadgroup, grid, strict=True)]
        with self.lock:
            self.library.emu_run(ctypes.byref(job))
        if job.fault:
            raise self._run_fault(job)
        return Result(outputs, job.shared_bytes, list(job.counters))

    def _run_fault(self, job: Launch) -> KernelFault:
        line = job.line
        if not line and job.pc:
            line = _line_of(self.path, self.library, job.pc)
        message = re.sub(
            r"threadgroup variable #(\d+)",
            lambda m: f"threadgroup variable {self.shared_names[int(m.group(1))]}",
            job.message.decode(),
        )
        names = [p.declaration.split()[-1] for p in self.text.parameters]
        message = re.sub(r"buffer #(\d+)", lambda m: names[int(m.group(1))], message)
        thread = None if KINDS[job.fault - 1] == "unwritten-output" else tuple(job.thread)
        return self.fault(KINDS[job.fault - 1], message, line=line, thread=thread)


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _line_of(path: Path, library: ctypes.CDLL, pc: int) -> int:
    """The innermost line of the kernel's text among the frames inlined at ``pc``, 0 if unknown."""
    info = _DlInfo()
    entry = ctypes.cast(library.emu_run, ctypes.c_void_p)
    found = ctypes.CDLL(None).dladdr(entry, ctypes.byref(info))
    address = hex(pc - 1 - ((info.base or 0) if found else 0))
    for name in ("addr2line", "llvm-symbolizer", "llvm-addr2line"):
        tool = shutil.which(name)
        if not tool:
            continue
        flags = ["--inlines", "-e" if "addr2line" in name else "--obj", str(path), address]
        output = subprocess.run([tool, *flags], capture_output=True, text=True).stdout
        lines = re.findall(rf"{re.escape(TEXT_NAME)}:(\d+)", output)
        if lines:
            return int(lines[0])
    return 0


def aligned(array: np.ndarray, bytes: int = 64) -> np.ndarray:
    """``array``, or a copy aligned for vector loads, as GPU memory is."""
    if array.ctypes.data % bytes == 0 or not array.flags.c_contiguous:
        return array
    buffer = np.empty(array.nbytes + bytes, dtype=np.uint8)
    start = -buffer.ctypes.data % bytes
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def storage(dtype: mx.Dtype) -> np.dtype:
    """The numpy dtype that holds an MLX dtype's bytes (bfloat16 as uint16)."""
    if dtype == mx.bfloat16:
        return np.dtype(np.uint16)
    return np.dtype(str(dtype).removeprefix("mlx.core."))


def to_numpy(array: mx.array) -> np.ndarray:
    """The array's memory as numpy sees it, strides and all."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16) if array.ndim else array.reshape(1).view(mx.uint16)[0]
    return np.array(array, copy=False)


def to_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """An MLX array of what ``storage(dtype)`` holds."""
    made = mx.array(array)
    if dtype == mx.bfloat16:
        return made.reshape(1).view(dtype).reshape(()) if made.ndim == 0 else made.view(dtype)
    return made


def describe(array: np.ndarray, source: str) -> np.ndarray:
    """The memory behind an input parameter: the array itself, its shape, strides or rank."""
    if source == "input":
        return array
    if source == "shape":
        return np.array(array.shape, dtype=np.int32)
    if source == "strides":
        return np.array([s // array.itemsize for s in array.strides], dtype=np.int64)
    return np.array(array.ndim, dtype=np.int32)


def extent(array: np.ndarray) -> int:
    """Bytes from an array's first element to the end of its last, strides included."""
    if array.size == 0:
        return 0
    steps = zip(array.shape, array.strides, strict=True)
    return sum((n - 1) * s for n, s in steps) + array.itemsize
