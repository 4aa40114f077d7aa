"""For cuda_check.py: the header's SIMD functions and matrices against numpy, and planted faults."""

from math import prod

import mlx.core as mx
import numpy as np

from mlx_kda.runners import metal_kernel

GROUPS = ((64, 1, 1), (16, 4, 1), (8, 4, 3), (5, 7, 2), (48, 1, 1))
# {name: (expression, what it is for the values x of the n lanes of a SIMD-group)}
LANES = {
    "lane": ("float(thread_index_in_simdgroup)", lambda x, n: np.arange(n)),
    "shuffle": ("simd_shuffle(x, 3)", lambda x, n: np.full(n, x[3])),
    "xor": ("simd_shuffle_xor(x, 1)", lambda x, n: x[np.arange(n) ^ 1]),
    "up": ("simd_shuffle_up(x, 2)", lambda x, n: x[np.where(np.arange(n) < 2, np.arange(n),
                                                             np.arange(n) - 2)]),
    "sum": ("simd_sum(x)", lambda x, n: np.full(n, x.sum())),
    "max": ("simd_max(x)", lambda x, n: np.full(n, x.max())),
    "prefix": ("simd_prefix_exclusive_sum(x)", lambda x, n: np.cumsum(x) - x),
    "votes": (
        "float(popcount(uint(ulong(simd_ballot(x > 8.0f)) & ((1u << thread_index_in_simdgroup) - 1u"
        "))))",
        lambda x, n: np.cumsum(x > 8) - (x > 8),
    ),
    "quad": ("quad_sum(x)", lambda x, n: x[: n // 4 * 4].reshape(-1, 4).sum(1).repeat(4)),
}  # fmt: skip
MATRIX = """
    simdgroup_matrix<A, 8, 8> a_m;
    simdgroup_matrix<B, 8, 8> b_m;
    simdgroup_float8x8 c_m;
    simdgroup_load(a_m, a, 8);
    simdgroup_load(b_m, b, 8, ulong2(0, 0), true);
    simdgroup_load(c_m, c, 8);
    simdgroup_multiply_accumulate(c_m, a_m, b_m, c_m);
    simdgroup_store(c_m, out, 8);
    const int lane = int(thread_index_in_simdgroup);
    const int row = lane / 16 * 4 + lane / 2 % 4;
    const int column = lane / 8 % 2 * 4 + lane % 2 * 2;
    elements[row * 8 + column] = a_m.thread_elements()[0];
    elements[row * 8 + column + 1] = a_m.thread_elements()[1];
"""


def lanes(group: tuple[int, int, int], runner: str = "cuda") -> dict[str, float]:
    """Largest difference from numpy of every function, in a threadgroup of this shape."""
    n = prod(group)
    lines = [f"out[{i} * {n} + at] = {e};" for i, (e, _) in enumerate(LANES.values())]
    source = "\n".join([
        "uint at = thread_index_in_threadgroup;",
        "uint3 p = thread_position_in_threadgroup;",
        "place[at] = p.x + 100 * p.y + 10000 * p.z;",
        "float x = a[at];",
        *lines,
    ])  # fmt: skip
    a = np.random.default_rng(n).integers(0, 16, n).astype(np.float32)
    out, place = metal_kernel(
        name="kda_lanes", input_names=["a"], output_names=["out", "place"], source=source,
        runner=runner,
    )(
        inputs=[mx.array(a)], grid=group, threadgroup=group,
        output_shapes=[(len(LANES), n), (n,)], output_dtypes=[mx.float32, mx.uint32],
    )  # fmt: skip
    at = np.arange(n)
    x, y, z = at % group[0], at // group[0] % group[1], at // (group[0] * group[1])
    worst = {"position": float(np.abs(np.array(place) - (x + 100 * y + 10000 * z)).max())}
    for i, (name, (_, truth)) in enumerate(LANES.items()):
        want = [truth(a[s : s + 32], len(a[s : s + 32])) for s in range(0, n, 32)]
        got = [np.array(out)[i, s : s + 32] for s in range(0, n, 32)]
        off = [np.abs(g[: len(w)] - w).max() for g, w in zip(got, want, strict=True) if len(w)]
        worst[name] = float(np.max(off))
    return worst


def matrices(kind_a: mx.Dtype, kind_b: mx.Dtype, runner: str = "cuda") -> tuple[float, bool]:
    """(Error of c + a b^T over |c| + |a| |b|^T, whether lanes hold the elements as Apple's do)."""
    rng = np.random.default_rng(1)
    a, b, c = (mx.array(rng.standard_normal((8, 8)).astype(np.float32)) for _ in range(3))
    a, b = a.astype(kind_a), b.astype(kind_b)
    out, elements = metal_kernel(
        name="kda_matrices", input_names=["a", "b", "c"], output_names=["out", "elements"],
        source=MATRIX, runner=runner,
    )(
        inputs=[a, b, c], template=[("A", kind_a), ("B", kind_b)],
        grid=(32, 1, 1), threadgroup=(32, 1, 1),
        output_shapes=[(8, 8), (8, 8)], output_dtypes=[mx.float32, mx.float32],
    )  # fmt: skip
    x, y, z = (np.array(m.astype(mx.float32)).astype(np.float64) for m in (a, b, c))
    error = np.abs(np.array(out) - (z + x @ y.T)) / (np.abs(z) + np.abs(x) @ np.abs(y.T))
    return float(error.max()), bool(np.array_equal(np.array(elements), np.float32(x)))


# Faults for the tools of compute-sanitizer, in kernels with names like ours: what silences a tool
# silences these too. `rest` is an output that nothing writes.
PLANTED = {
    "memcheck": "out[i] = a[i + 1000];",
    "racecheck": "threadgroup float s[64]; s[i] = a[i]; out[i] = s[63 - i];",
    "synccheck": "if (i < 7) { threadgroup_barrier(mem_flags::mem_threadgroup); } out[i] = a[i];",
    "initcheck": "out[i] = rest[i] + a[i];",
}


def plant(tool: str) -> None:
    """Runs a kernel with the fault that ``tool`` is there to find."""
    out, _ = metal_kernel(
        name=f"kda_planted_{tool}", input_names=["a"], output_names=["out", "rest"],
        source=f"uint i = thread_index_in_threadgroup; {PLANTED[tool]}", runner="cuda",
    )(
        inputs=[mx.ones(64)], grid=(64, 1, 1), threadgroup=(64, 1, 1),
        output_shapes=[(64,), (64,)], output_dtypes=[mx.float32, mx.float32],
    )  # fmt: skip
    mx.eval(out)
