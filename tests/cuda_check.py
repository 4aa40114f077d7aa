"""Run the kernels' bodies on a CUDA GPU: against float64, under compute-sanitizer, timed.

    python tests/cuda_check.py check            every kernel and mode against float64
    python tests/cuda_check.py sanitize [I N]   small calls of everything, for compute-sanitizer
    python tests/cuda_check.py time             T = 2048 and 8192, beside mlx-lm's vector kernel

For initcheck leave out compute-sanitizer's kernel filter (memory that MLX's kernels wrote would
count as unwritten) and look for lines that name a kernel of ours: MLX's copies are reported too.
Needs MLX's CUDA build. Prints one JSON line a result; not collected by pytest.
"""

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import layer64, oracle  # noqa: E402
from helpers.kernels import OPS, as_dtype, f32, law, memory, numpy, rounded, run, step  # noqa: E402

from mlx_kda.kernels.epilogue import kda_epilogue  # noqa: E402
from mlx_kda.kernels.prologue import kda_prologue  # noqa: E402

RUNNER = "cuda"
MODES = {
    "recurrent": ("recurrent", {}),
    "exact": ("chunk", {}),
    "half": ("chunk", {"mode": "half"}),
}


def say(**result) -> None:
    print(json.dumps(result), flush=True)


def check() -> bool:
    """Errors against float64 on every row, and of layers in every dtype; True if all are right."""
    good = True
    for row in oracle.ROWS:
        for dtype in ("float32", "bfloat16"):
            x = as_dtype(oracle.make(row, H=2, Dk=128, Dv=128), dtype)
            truth = oracle.recurrence(*x.arrays())
            sequential = oracle.recurrence(*x.arrays(), dtype=np.float32)
            floor = [oracle.error(s, t) for s, t in zip(sequential, truth, strict=True)]
            rounding = oracle.error(rounded(dtype)(truth[0]), truth[0])
            for mode, (kernel, options) in MODES.items():
                if mode == "half" and dtype == "float32":
                    continue
                o, S = run(kernel, x, dtype, runner=RUNNER, **options)
                errors = [oracle.error(o, truth[0]), oracle.error(S, truth[1])]
                if mode == "half":
                    bounds = [2 * rounding, 5e-4]
                else:
                    bounds = [5 * floor[0] + 1.1 * (rounding if dtype != "float32" else 0),
                              5 * floor[1]]  # fmt: skip
                ok = all(e <= b for e, b in zip(errors, bounds, strict=True))
                good &= ok
                say(test=mode, row=row, dtype=dtype, o=errors[0], state=errors[1],
                    sequential=floor, ok=ok)  # fmt: skip
    for T, Dk, Dv, dtype in (
        *((1, 128, 128, d) for d in ("float32", "float16", "bfloat16")),
        (8, 64, 32, "float32"),
        (6, 256, 256, "bfloat16"),
        (5, 96, 160, "float32"),
    ):
        for bound in (None, -5.0):
            good &= one_layer(T, Dk, Dv, dtype, bound)
    return good


def one_layer(T, Dk, Dv, dtype, bound, B=2) -> bool:
    """A ragged step through kda_decode, its projections and gates through prologue and epilogue."""
    layer = layer64.make(B=B, T=T, H=1, Hv=2, Dk=Dk, Dv=Dv, lower_bound=bound,
                         rounded=rounded(dtype), seed=T)  # fmt: skip
    lengths = [T, T // 2]
    truth = layer.run(lengths)
    kind = getattr(mx, dtype)
    y, mem = step(layer, memory(layer, dtype), dtype=dtype, lengths=mx.array(lengths), keep=True,
                  runner=RUNNER)  # fmt: skip
    qkv, _ = kda_prologue(
        *(f32(x).astype(kind) for x in (layer.q, layer.k, layer.v)),
        taps=tuple(f32(t).astype(kind) for t in layer.taps),
        windows=memory(layer, dtype)[:3],
        H=1,
        Hv=2,
        runner=RUNNER,
    )
    errors = [oracle.error(numpy(y), truth[0]), oracle.error(numpy(mem.state)[:, -1], truth[1])]
    errors += [oracle.error(numpy(x), t) for x, t in zip(qkv, layer.mixed(), strict=True)]
    windows = all(np.array_equal(numpy(a), np.float32(b))
                  for a, b in zip(mem[:3], truth[2], strict=True))  # fmt: skip
    rows = mx.array(layer.z.shape[1:2] * B)
    z = f32(layer.z).astype(kind)
    out = kda_epilogue(z, z, f32(layer.weight), layer.eps, lengths=rows, runner=RUNNER)
    norm = np.sqrt((layer.z**2).mean(-1, keepdims=True) + layer.eps)
    gated = layer.z / norm * layer.weight * layer64.sigmoid(layer.z)
    errors.append(oracle.error(numpy(out), gated))
    limit = {"float32": 2e-6, "float16": 4e-4, "bfloat16": 3e-3}[dtype]
    ok = windows and errors[1] < 2e-6 and all(e < limit for e in errors)
    say(test="decode", T=T, Dk=Dk, Dv=Dv, dtype=dtype, y=errors[0], state=errors[1],
        prologue=max(errors[2:5]), epilogue=errors[5], windows=windows, ok=ok)  # fmt: skip
    return ok


def sanitize(part: int = 0, parts: int = 1) -> bool:
    """Small ragged calls of every kernel: odd sizes, tails, Hv > H, both operand types.

    compute-sanitizer is slow: ``part`` of ``parts`` takes every parts-th call.
    """
    sizes = ((32, 64), (96, 32), (128, 64))
    calls = [partial(one_prefill, mode, Dk, Dv) for Dk, Dv in sizes for mode in MODES]
    calls += [partial(one_layer, 3, 64, 32, "float32", None)]
    calls += [partial(one_layer, 5, 256, 192, "float16", -5.0)]
    calls += [partial(raw_prefill, kernel) for kernel in OPS]
    results = [call() for call in calls[part::parts]]  # all of them, not up to the first failure
    return all(results)


def one_prefill(mode, Dk, Dv) -> bool:
    """A ragged batch of 37 and 9 tokens from a state."""
    x = oracle.make("mixed", T=37, B=2, H=1, Hv=2, Dk=Dk, Dv=Dv).with_state()
    x = as_dtype(x, "float16")
    truth = oracle.recurrence(*x.arrays(), state=x.state, lengths=[37, 9])
    kernel, options = MODES[mode]
    o, S = run(kernel, x, "float16", runner=RUNNER, lengths=[37, 9], **options)
    ok = oracle.error(o, truth[0]) < 1e-3 and oracle.error(S, truth[1]) < 1e-3
    say(test=mode, Dk=Dk, Dv=Dv, ok=ok)
    return ok


def raw_prefill(kernel) -> bool:
    """Raw gate and beta."""
    layer = layer64.make(B=1, T=18, H=1, Hv=2, Dk=32, Dv=32)
    q, k, v = (f32(x) for x in layer.mixed())
    _, S = OPS[kernel](q, k, v, f32(layer.a), f32(layer.b), state=f32(layer.state),
                       law=law(layer), beta_law="sigmoid", runner=RUNNER)  # fmt: skip
    truth = oracle.recurrence(*layer.mixed(), layer.gate(), layer.beta(), state=layer.state)
    ok = oracle.error(numpy(S), truth[1]) < 2e-6
    say(test=f"raw gate, {kernel}", ok=ok)
    return ok


def median_ms(call, repeats=9) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def timing() -> bool:
    """B = 1, 32 heads, Dk = Dv = 128, bfloat16 activations; host clock around an evaluation."""
    from helpers.shipped import mlx_lm_gated_delta

    from mlx_kda.kernels import metal_kernel
    from mlx_kda.kernels.chunk import kda_chunk
    from mlx_kda.kernels.recurrent import kda_recurrent

    theirs = mlx_lm_gated_delta(lambda **a: metal_kernel(**a, runner=RUNNER))
    vector = theirs["gated_delta_step_vec"]
    H, D = 32, 128
    for T in (2048, 8192):
        x = oracle.make("random", T=64, H=H, Dk=D, Dv=D)
        q, k, v, beta = (
            mx.tile(mx.array(a), (1, T // 64, *([1] * (a.ndim - 2)))).astype(mx.bfloat16)
            for a in (x.q, x.k, x.v, x.beta)
        )
        g = mx.tile(mx.array(x.g), (1, T // 64, 1, 1))
        decay, state = mx.exp(g), mx.zeros((1, H, D, D))
        mx.eval(q, k, v, beta, g, decay, state)

        def peer(q=q, k=k, v=v, decay=decay, beta=beta, state=state, T=T):
            return vector(
                inputs=[q, k, v, decay, beta, state, T],
                template=[("InT", mx.bfloat16), ("StT", mx.float32), ("Dk", D), ("Dv", D),
                          ("Hk", H), ("Hv", H)],
                grid=(32, D, H),
                threadgroup=(32, 4, 1),
                output_shapes=[(1, T, H, D), state.shape],
                output_dtypes=[mx.bfloat16, mx.float32],
            )  # fmt: skip

        calls = {"mlx-lm gated_delta_step_vec": peer}
        for name, fn, options in (
            ("kda_recurrent", kda_recurrent, {}),
            ("kda_chunk exact", kda_chunk, {}),
            ("kda_chunk half", kda_chunk, {"mode": "half"}),
        ):
            calls[name] = lambda fn=fn, o=options, a=(q, k, v, g, beta): fn(*a, runner=RUNNER, **o)
        for name, call in calls.items():
            say(time=name, T=T, ms=round(median_ms(lambda c=call: mx.eval(c())), 3))
    return True


if __name__ == "__main__":
    what = {"check": check, "sanitize": sanitize, "time": timing}[sys.argv[1]]
    passed = what(*map(int, sys.argv[2:]))
    say(what=sys.argv[1], runner=RUNNER, mlx=mx.__version__, passed=bool(passed))
    sys.exit(0 if passed else 1)
