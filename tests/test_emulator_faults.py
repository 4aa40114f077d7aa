"""Every kind of fault, planted, is reported with its kind and line; the corrected twin is clean."""

import sys
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from mlx_kda.kernels import KernelFault, metal_kernel

# macOS has no addr2line: there a fault that is known by its address alone has no line.
SYMBOLS = sys.platform == "linux"
N = 128  # elements; two threadgroups of 64 threads unless a case says otherwise


@dataclass
class Case:
    """A body with a fault on a line marked FAULT (a race has two ends), and its right twin."""

    kind: str
    bad: str
    good: str
    group: int = 64
    grid: int = N
    size: int = N
    out_dtype: mx.Dtype = mx.float32

    def lines(self):
        marked = {i for i, s in enumerate(self.bad.split("\n"), 1) if "FAULT" in s}
        return marked or {None}


def run(source, case, runner="emulator"):
    kernel = metal_kernel(
        name="planted",
        input_names=["a", "small"],
        output_names=["out"],
        source=source,
        runner=runner,
    )
    return kernel(
        inputs=[mx.arange(case.size, dtype=mx.float32), mx.array([1.0, 2.0, 3.0])],
        grid=(case.grid, 1, 1),
        threadgroup=(case.group, 1, 1),
        output_shapes=[(case.size,)],
        output_dtypes=[case.out_dtype],
    )[0]


CASES = {
    "read past an input": Case(
        "out-of-bounds",
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i + 1];  // FAULT
        """,
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[min(i + 1, 127u)];
        """,
    ),
    "read before an input": Case(
        "out-of-bounds",
        """
        int i = thread_position_in_grid.x;
        out[i] = a[i - 1];  // FAULT
        """,
        """
        int i = thread_position_in_grid.x;
        out[i] = a[max(i - 1, 0)];
        """,
    ),
    "read past a constant input": Case(
        "out-of-bounds",
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i] + small[i % 4];  // FAULT
        """,
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i] + small[i % 3];
        """,
    ),
    "write past an output": Case(
        "out-of-bounds",
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i];
        if (i == 127)
          out[i + 1] = 0;  // FAULT
        """,
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i];
        if (i == 127)
          out[i] = 0;
        """,
    ),
    "far outside every buffer": Case(
        "out-of-bounds",
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i + (1ul << 44)];  // FAULT
        """,
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i];
        """,
    ),
    "write into an input": Case(
        "out-of-bounds",
        """
        uint i = thread_position_in_grid.x;
        ((device float*)a)[i] = 1;  // FAULT
        out[i] = 1;
        """,
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i];
        """,
    ),
    "past a threadgroup array": Case(
        "out-of-bounds",
        """
        threadgroup float s[63];
        uint l = thread_position_in_threadgroup.x;
        s[l] = a[thread_position_in_grid.x];  // FAULT
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = s[l];
        """,
        """
        threadgroup float s[64];
        uint l = thread_position_in_threadgroup.x;
        s[l] = a[thread_position_in_grid.x];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = s[l];
        """,
    ),
    "from one threadgroup array into the next": Case(
        "out-of-bounds",
        """
        threadgroup float s[64], t[64];
        uint l = thread_position_in_threadgroup.x;
        s[l] = t[l] = a[thread_position_in_grid.x];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float x = s[l + 64];  // FAULT
        out[thread_position_in_grid.x] = x + t[l];
        """,
        """
        threadgroup float s[64], t[64];
        uint l = thread_position_in_threadgroup.x;
        s[l] = t[l] = a[thread_position_in_grid.x];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = s[63 - l] + t[l];
        """,
    ),
    "vector load over the end": Case(
        "out-of-bounds",
        """
        uint i = thread_position_in_grid.x;
        const device packed_float4* v = (const device packed_float4*)(a + i);
        out[i] = dot(float4(*v), float4(1.0f));  // FAULT
        """,
        """
        uint i = thread_position_in_grid.x;
        const device packed_float4* v = (const device packed_float4*)(a + min(i, 124u));
        out[i] = dot(float4(*v), float4(1.0f));
        """,
    ),
    "matrix load over the end": Case(
        "out-of-bounds",
        """
        simdgroup_float8x8 m;
        simdgroup_load(m, a + 65, 8);  // FAULT
        simdgroup_store(m, out + 64 * threadgroup_position_in_grid.x, 8);
        """,
        """
        simdgroup_float8x8 m;
        simdgroup_load(m, a + 64, 8);
        simdgroup_store(m, out + 64 * threadgroup_position_in_grid.x, 8);
        """,
        group=32,
        grid=64,
    ),
    "shuffle from a lane that is not there": Case(
        "out-of-bounds",
        """
        uint i = thread_position_in_grid.x;
        out[i] = simd_shuffle(a[i], ushort(32));  // FAULT
        """,
        """
        uint i = thread_position_in_grid.x;
        out[i] = simd_shuffle(a[i], ushort(31));
        """,
    ),
    "missing barrier between write and read": Case(
        "race",
        """
        threadgroup float s[64];
        uint l = thread_position_in_threadgroup.x;
        s[l] = a[thread_position_in_grid.x];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        float x = s[63 - l] + s[l];  // FAULT
        threadgroup_barrier(mem_flags::mem_threadgroup);
        s[l] = x;
        out[thread_position_in_grid.x] = x;
        """,
        """
        threadgroup float s[64];
        uint l = thread_position_in_threadgroup.x;
        s[l] = a[thread_position_in_grid.x];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float x = s[63 - l] + s[l];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        s[l] = x;
        out[thread_position_in_grid.x] = x;
        """,
    ),
    "missing barrier between read and next write": Case(
        "race",
        """
        threadgroup float s[64];
        uint l = thread_position_in_threadgroup.x;
        s[l] = a[thread_position_in_grid.x];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float x = s[63 - l];  // FAULT
        s[l] = x + 1;  // FAULT
        out[thread_position_in_grid.x] = x;
        """,
        """
        threadgroup float s[64];
        uint l = thread_position_in_threadgroup.x;
        s[l] = a[thread_position_in_grid.x];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float x = s[63 - l];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        s[l] = x + 1;
        out[thread_position_in_grid.x] = x;
        """,
    ),
    "two threads write one place": Case(
        "race",
        """
        threadgroup float s[32];
        uint l = thread_position_in_threadgroup.x;
        s[l / 2] = a[thread_position_in_grid.x];  // FAULT
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = s[l / 2];
        """,
        """
        threadgroup float s[32];
        uint l = thread_position_in_threadgroup.x;
        if (l % 2 == 0) s[l / 2] = a[thread_position_in_grid.x];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = s[l / 2];
        """,
    ),
    "a barrier for the other memory": Case(
        "race",
        """
        threadgroup float s[64];
        uint l = thread_position_in_threadgroup.x;
        s[l] = a[thread_position_in_grid.x];
        threadgroup_barrier(mem_flags::mem_device);
        float x = s[63 - l];  // FAULT
        out[thread_position_in_grid.x] = x;
        """,
        """
        threadgroup float s[64];
        uint l = thread_position_in_threadgroup.x;
        s[l] = a[thread_position_in_grid.x];
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
        float x = s[63 - l];
        out[thread_position_in_grid.x] = x;
        """,
    ),
    "missing simdgroup_barrier": Case(
        "race",
        """
        threadgroup float s[64];
        uint l = thread_position_in_threadgroup.x;
        s[l] = a[thread_position_in_grid.x];
        float x = s[l ^ 1];  // FAULT
        out[thread_position_in_grid.x] = x;
        """,
        """
        threadgroup float s[64];
        uint l = thread_position_in_threadgroup.x;
        s[l] = a[thread_position_in_grid.x];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        float x = s[l ^ 1];
        out[thread_position_in_grid.x] = x;
        """,
    ),
    "matrix stored and loaded with no barrier": Case(
        "race",
        """
        threadgroup float s[64];
        simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8>(2.0f), t;
        simdgroup_store(m, s, 8);
        simdgroup_load(t, s, 8, ulong2(0, 0), true);  // FAULT
        simdgroup_store(t, out + 64 * threadgroup_position_in_grid.x, 8);
        """,
        """
        threadgroup float s[64];
        simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8>(2.0f), t;
        simdgroup_store(m, s, 8);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_load(t, s, 8, ulong2(0, 0), true);
        simdgroup_store(t, out + 64 * threadgroup_position_in_grid.x, 8);
        """,
        group=32,
        grid=64,
    ),
    "two threadgroups write one output": Case(
        "race",
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i];  // FAULT
        if (thread_position_in_threadgroup.x == 0)
          out[7] = i;  // FAULT
        """,
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i];
        if (i == 7)
          out[7] = i + 1;
        """,
    ),
    "a threadgroup reads what another wrote": Case(
        "race",
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i];
        if (i == 64)
          out[i] = out[0] + 1;  // FAULT
        """,
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i];
        if (i == 64)
          out[i] = out[i] + 1;
        """,
    ),
    "threads of a group exchange through device memory": Case(
        "race",
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float x = out[i ^ 33];  // FAULT
        threadgroup_barrier(mem_flags::mem_device);
        out[i] = x;
        """,
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i];
        threadgroup_barrier(mem_flags::mem_device);
        float x = out[i ^ 33];
        threadgroup_barrier(mem_flags::mem_device);
        out[i] = x;
        """,
    ),
    "barrier in a branch": Case(
        "divergence",
        """
        uint l = thread_position_in_threadgroup.x;
        if (l < 32) {
          threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT
        }
        out[thread_position_in_grid.x] = l;
        """,
        """
        uint l = thread_position_in_threadgroup.x;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = l;
        """,
    ),
    "return above a barrier": Case(
        "divergence",
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i];
        if (i >= 100) return;
        threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT
        out[i] = 2;
        """,
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i >= 100) return;
        out[i] = 2;
        """,
    ),
    "threads at different barriers": Case(
        "divergence",
        """
        uint l = thread_position_in_threadgroup.x;
        if (l < 32)
          threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT
        else
          threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = l;
        """,
        """
        uint l = thread_position_in_threadgroup.x;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = l;
        """,
    ),
    "SIMD sum in a branch": Case(
        "divergence",
        """
        uint i = thread_position_in_grid.x;
        float x = a[i];
        if (thread_index_in_simdgroup < 16)
          x = simd_sum(x);  // FAULT
        out[i] = x;
        """,
        """
        uint i = thread_position_in_grid.x;
        float x = simd_sum(a[i]);
        out[i] = x;
        """,
    ),
    "different SIMD operations": Case(
        "divergence",
        """
        uint i = thread_position_in_grid.x;
        float x = a[i];
        if (thread_index_in_simdgroup < 16)
          x = simd_sum(x);
        else
          x = simd_max(x);  // FAULT
        out[i] = x;
        """,
        """
        uint i = thread_position_in_grid.x;
        float x = simd_sum(a[i]);
        out[i] = x;
        """,
    ),
    "the same SIMD operation twice on one line": Case(
        "divergence",
        """
        uint i = thread_position_in_grid.x;
        float x = a[i];
        x = thread_index_in_simdgroup < 16 ? simd_sum(x) : simd_sum(2 * x);  // FAULT
        out[i] = x;
        """,
        """
        uint i = thread_position_in_grid.x;
        float x = simd_sum(a[i]) + simd_sum(a[i]) * simd_sum(x = 1);
        out[i] = x;
        """,
    ),
    "some lanes loop longer": Case(
        "divergence",
        """
        uint i = thread_position_in_grid.x;
        float x = a[i];
        for (uint k = 0; k < 2 + i % 2; ++k)
          x = simd_sum(x);  // FAULT
        out[i] = x;
        """,
        """
        uint i = thread_position_in_grid.x;
        float x = a[i];
        for (uint k = 0; k < 3; ++k)
          x = simd_sum(x);
        out[i] = x;
        """,
    ),
    "matrix product in a branch": Case(
        "divergence",
        """
        simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8>(2.0f);
        if (thread_index_in_simdgroup > 3)
          simdgroup_multiply(m, m, m);  // FAULT
        simdgroup_store(m, out + 64 * threadgroup_position_in_grid.x, 8);
        """,
        """
        simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8>(2.0f);
        simdgroup_multiply(m, m, m);
        simdgroup_store(m, out + 64 * threadgroup_position_in_grid.x, 8);
        """,
        group=32,
        grid=64,
    ),
    "threadgroup memory read before it is written": Case(
        "uninitialised",
        """
        threadgroup float s[64];
        uint l = thread_position_in_threadgroup.x;
        if (l != 5) s[l] = l;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = s[63 - l];  // FAULT
        """,
        """
        threadgroup float s[64];
        uint l = thread_position_in_threadgroup.x;
        s[l] = l;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = s[63 - l];
        """,
    ),
    "threadgroup memory does not outlive its threadgroup": Case(
        "uninitialised",
        """
        threadgroup float s[64];
        uint l = thread_position_in_threadgroup.x;
        if (threadgroup_position_in_grid.x == 0) s[l] = l;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = s[l];  // FAULT
        """,
        """
        threadgroup float s[64];
        uint l = thread_position_in_threadgroup.x;
        s[l] = l;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = s[l];
        """,
    ),
    "adding to an output nobody initialised": Case(
        "uninitialised",
        """
        uint i = thread_position_in_grid.x;
        out[i] += a[i];  // FAULT
        """,
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i];
        out[i] += a[i];
        """,
    ),
    "an output left out": Case(
        "unwritten-output",
        """
        uint i = thread_position_in_grid.x;
        if (i != 100) out[i] = a[i];
        """,
        """
        uint i = thread_position_in_grid.x;
        out[i] = a[i];
        """,
    ),
    "half an output left out": Case(
        "unwritten-output",
        """
        uint i = thread_position_in_grid.x;
        if (i % 2) out[i] = half(a[i]);
        """,
        """
        uint i = thread_position_in_grid.x;
        out[i] = half(a[i]);
        """,
        out_dtype=mx.float16,
    ),
    "40,192 bytes of threadgroup memory": Case(
        "limits",
        """
        threadgroup float s[10048];  // FAULT
        uint l = thread_position_in_threadgroup.x;
        s[l] = l;
        out[thread_position_in_grid.x] = s[l];
        """,
        """
        threadgroup float s[8192];
        uint l = thread_position_in_threadgroup.x;
        s[l] = l;
        out[thread_position_in_grid.x] = s[l];
        """,
    ),
    "2,048 threads": Case(
        "limits",
        "out[thread_position_in_grid.x] = 1;",
        "out[thread_position_in_grid.x % 128] = 1;",
        group=2048,
        grid=2048,
        size=2048,
    ),
    "text that is not ASCII": Case(
        "limits",
        "out[thread_position_in_grid.x] = 1;  // caf\u00e9 FAULT",
        "out[thread_position_in_grid.x] = 1;  // cafe",
    ),
    "a function Metal does not have": Case(
        "unsupported",
        """
        uint i = thread_position_in_grid.x;
        out[i] = frobnicate(a[i]);  // FAULT
        """,
        """
        uint i = thread_position_in_grid.x;
        out[i] = exp(a[i] * 0);
        """,
    ),
    "an integer division by zero": Case(
        "unsupported",
        """
        uint i = thread_position_in_grid.x;
        int zero = int(small[0]) - 1;
        out[i] = int(a[i]) / zero;  // FAULT
        """,
        """
        uint i = thread_position_in_grid.x;
        int one = int(small[0]);
        out[i] = int(a[i]) / one;
        """,
    ),
    "double": Case(
        "unsupported",
        """
        uint i = thread_position_in_grid.x;
        double x = a[i];  // FAULT
        out[i] = x;
        """,
        """
        uint i = thread_position_in_grid.x;
        float x = a[i];
        out[i] = x;
        """,
    ),
    "a threadgroup variable with an initialiser": Case(
        "unsupported",
        """
        threadgroup float s = 1.0f;  // FAULT
        out[thread_position_in_grid.x] = s;
        """,
        """
        threadgroup float s;
        if (thread_position_in_threadgroup.x == 0) s = 1.0f;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = s;
        """,
    ),
    "an implicit conversion to bfloat": Case(
        "unsupported",
        """
        uint i = thread_position_in_grid.x;
        bfloat b = a[i];  // FAULT
        out[i] = b;
        """,
        """
        uint i = thread_position_in_grid.x;
        bfloat b = bfloat(a[i]);
        out[i] = b;
        """,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_planted_fault_is_reported(name):
    case = CASES[name]
    with pytest.raises(KernelFault) as caught:
        run(case.bad, case)
    fault = caught.value
    assert fault.kind == case.kind, fault
    assert fault.kernel == "planted"
    assert fault.line in case.lines() or (fault.line is None and not SYMBOLS), fault
    if case.kind in ("out-of-bounds", "race", "divergence", "uninitialised"):
        assert len(fault.thread) == 3


@pytest.mark.parametrize("name", [n for n in CASES if n != "2,048 threads"])
def test_corrected_twin_is_clean(name):
    case = CASES[name]
    out = np.array(run(case.good, case).astype(mx.float32))
    assert np.isfinite(out).all()


def test_fast_runner_survives_a_wild_access():
    """Without checks a pointer to nowhere is still a fault, not the end of the process."""
    case = Case("out-of-bounds", "out[thread_position_in_grid.x] = a[1ul << 44];  // FAULT", "")
    with pytest.raises(KernelFault) as caught:
        run(case.bad, case, runner="emulator-fast")
    assert caught.value.kind == "out-of-bounds"
    good = run("out[thread_position_in_grid.x] = 1;", case, runner="emulator-fast")
    assert mx.all(good == 1)


def test_fault_text_quotes_the_line_and_names_the_memory():
    case = CASES["past a threadgroup array"]
    with pytest.raises(KernelFault, match="write at byte 252 of threadgroup variable s"):
        run(case.bad, case)
    case = CASES["read past an input"]
    quote = r": out\[i\] = a\[i" if SYMBOLS else ""
    with pytest.raises(KernelFault, match=r"read at byte 512 of a \(512 bytes\)" + quote):
        run(case.bad, case)


def test_two_simd_operations_among_a_macros_arguments():
    """No line directive may stand there; the kernel still runs."""
    source = """
    #define PICK(a, b) (a) + (b)
    uint i = thread_position_in_grid.x;
    out[i] = PICK(simd_sum(a[i]), simd_max(a[i])) + simd_min(a[i]);
    """
    out = np.array(run(source, CASES["double"])).reshape(4, 32)
    a = np.arange(128.0).reshape(4, 32)
    assert (out == (a.sum(1) + a.max(1) + a.min(1))[:, None]).all()
