"""Every kind of fault, planted, is reported with its kind and line; the corrected twin is clean."""

import sys

import mlx.core as mx
import numpy as np
import pytest
from helpers.launch import launch
from helpers.planted import CASES, Case

from mlx_kda.runners import KernelFault

# macOS has no addr2line: there a fault that is known by its address alone has no line.
SYMBOLS = sys.platform == "linux"


def run(source, case, runner="emulator"):
    return launch(
        source,
        [mx.arange(case.size, dtype=mx.float32), mx.array([1.0, 2.0, 3.0])],
        names="a small",
        grid=case.grid,
        group=case.group,
        dtypes=case.out_dtype,
        runner=runner,
    )


@pytest.mark.parametrize("name", CASES)
def test_planted_fault_is_reported(name):
    case = CASES[name]
    with pytest.raises(KernelFault) as caught:
        run(case.bad, case)
    fault = caught.value
    assert fault.kind == case.kind, fault
    assert fault.kernel == "tested"
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
    case = Case("out-of-bounds", "out[thread_position_in_grid.x] = a[1ul << 44];  // FAULT")
    with pytest.raises(KernelFault) as caught:
        run(case.bad, case, runner="emulator-fast")
    assert caught.value.kind == case.kind
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
