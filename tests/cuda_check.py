"""Run the kernels' bodies on a CUDA GPU: against float64 and under compute-sanitizer.

    python tests/cuda_check.py check [I N]      every kernel and mode against float64
    python tests/cuda_check.py sanitize [I N]   small calls of everything, for compute-sanitizer
    python tests/cuda_check.py plant TOOL       a kernel with the fault that a tool should find
    python tests/cuda_check.py findings LOG ... what compute-sanitizer said, by whose kernel

I N is every N-th call from the I-th on: N processes share the compiling. `check` needs MLX's CUDA
build; `sanitize` and `plant` launch the same text outside MLX's memory pools and graphs, which
compute-sanitizer does not see into; they need cupy and nvcc. Run them once without the tool, so
that it does not watch the compiler. Prints one JSON line a result; not collected by pytest. Times:
benchmarks/cuda_peers.py.
"""

import json
import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import layer64, on_cuda, plain_cuda, sanitizer  # noqa: E402
from helpers.kernels import (  # noqa: E402
    OPS,
    as_dtype,
    f32,
    gate_of,
    layer_state,
    numpy,
    parameters,
    projections,
    rounded,
    run,
    step,
)

from mlx_kda.kernels.epilogue import kda_epilogue  # noqa: E402
from mlx_kda.kernels.prologue import kda_prologue  # noqa: E402
from mlx_kda.kernels.route import moe_route  # noqa: E402
from mlx_kda.layers import MoE  # noqa: E402
from mlx_kda.ops import reference64 as oracle  # noqa: E402

RUNNER = "cuda"
MODES = {
    "recurrent": ("recurrent", {}),
    "exact": ("chunk", {}),
    "half": ("chunk", {"mode": "half"}),
}


def say(**result) -> None:
    print(json.dumps(result), flush=True)


def some(calls: list, part: int, parts: int) -> bool:
    """Every parts-th call from ``part`` on: all of them, not up to the first failure."""
    results = [call() for call in calls[part::parts]]
    return all(results)


LAYERS = (
    *((1, 128, 128, d) for d in ("float32", "float16", "bfloat16")),
    (8, 64, 32, "float32"),
    (6, 256, 256, "bfloat16"),
    (5, 96, 160, "float32"),
)


def check(part: int = 0, parts: int = 1) -> bool:
    """Every kernel, mode and dtype on every row of hard inputs; True if all are right."""
    calls = [partial(one_row, mode, row, dtype)
             for mode in MODES for dtype in ("float32", "bfloat16") for row in oracle.ROWS
             if (mode, dtype) != ("half", "float32")]  # fmt: skip
    calls += [partial(one_drift, mode, row) for mode in MODES for row in DRIFT]
    calls += [partial(one_lineage, kernel, gate, rule) for kernel in OPS
              for gate, rule in (("channel", False), ("head", True), ("none", True))]  # fmt: skip
    calls += [partial(one_prefill, mode, Dk, Dv) for mode in MODES
              for Dk, Dv in ((32, 96), (160, 64), (256, 256))]  # fmt: skip
    calls += [partial(one_layer, *layer, bound) for layer in LAYERS for bound in (None, -5.0)]
    calls += [partial(raw_prefill, kernel) for kernel in OPS]
    calls += [partial(one_route, name) for name in ROUTES]
    calls += [partial(one_group, group) for group in on_cuda.GROUPS]
    calls += [one_matrices]
    calls += [partial(one_experts, *x) for x in EXPERTS]
    return some(calls, part, parts)


def one_row(mode, row, dtype) -> bool:
    """Errors against float64 on one row, beside those of a float32 loop."""
    x = as_dtype(oracle.make(row, H=2, Dk=128, Dv=128), dtype)
    truth = oracle.recurrence(*x.arrays())
    sequential = oracle.recurrence(*x.arrays(), dtype=np.float32)
    floor = [oracle.error(s, t) for s, t in zip(sequential, truth, strict=True)]
    rounding = oracle.error(rounded(dtype)(truth[0]), truth[0]) if dtype != "float32" else 0
    kernel, options = MODES[mode]
    o, S = run(kernel, x, dtype, runner=RUNNER, **options)
    errors = [oracle.error(o, truth[0]), oracle.error(S, truth[1])]
    bounds = [5 * floor[0] + 1.1 * rounding, 5 * floor[1]]
    if mode == "half":
        bounds = [2 * rounding, 5e-4]
    ok = all(e <= b for e, b in zip(errors, bounds, strict=True))
    say(test=mode, row=row, dtype=dtype, o=errors[0], state=errors[1], sequential=floor, ok=ok)
    return ok


# Slow decay over 4,096 tokens: sums that are rounded to one side would shrink or grow the state.
DRIFT = ("repeated", "collinear", "random keys", "plain sum")


def one_drift(mode, row, T=4096) -> bool:
    """At most 8 x a float32 loop; the GPU's exp costs 5.7 x on collinear keys at this length, in
    kda_recurrent too."""
    x = oracle.make(row if row in oracle.ROWS else "random", T=T, H=1)
    if row == "random keys":
        x = oracle.Inputs(x.q, x.k, x.v, (x.g * 5e-4).astype(np.float32), x.beta)
    if row == "plain sum":
        x = oracle.Inputs(x.q, x.k, np.abs(x.v), np.zeros_like(x.g), np.full_like(x.beta, 1e-3))
    dtype = "float16" if mode == "half" else "float32"
    x = as_dtype(x, dtype)
    truth = oracle.recurrence(*x.arrays())
    sequential = oracle.recurrence(*x.arrays(), dtype=np.float32)
    kernel, options = MODES[mode]
    got = run(kernel, x, dtype, runner=RUNNER, **options)
    errors, floor = ([oracle.error(a, t) for a, t in zip(pair, truth, strict=True)]
                     for pair in (got, sequential))  # fmt: skip
    bounds = [8 * f for f in floor]
    if mode == "half":
        bounds = [2 * oracle.error(rounded(dtype)(truth[0]), truth[0]), 5e-4]
    ok = all(e <= b for e, b in zip(errors, bounds, strict=True))
    say(test=f"{mode}, {T} tokens", row=row, o=errors[0], state=errors[1], sequential=floor, ok=ok)
    return ok


def one_lineage(kernel, gate, delta_rule) -> bool:
    """Gates a head, no gate, no delta rule; Hv > H, from a state."""
    x = oracle.make("collinear", T=45, B=2, H=1, Hv=3, Dk=64, Dv=32).with_state()
    g = {"channel": x.g, "head": x.g[..., 0], "none": None}[gate]
    x = oracle.Inputs(x.q, x.k, x.v, g, x.beta, x.state)
    truth = oracle.recurrence(*x.arrays(), state=x.state, delta_rule=delta_rule)
    got = run(kernel, x, delta_rule=delta_rule, runner=RUNNER)
    errors = [oracle.error(a, t) for a, t in zip(got, truth, strict=True)]
    ok = all(e < 2e-6 for e in errors)
    say(test=f"{kernel}, gate {gate}, delta_rule {delta_rule}", o=errors[0], state=errors[1], ok=ok)
    return ok


ROUTES = {
    "256 experts": {"experts": 256, "top_k": 8},
    "groups": {"experts": 64, "top_k": 6, "groups": 8, "kept_groups": 3},
    "softmax": {"experts": 40, "top_k": 4, "activation": "softmax"},
    "not renormalised": {"experts": 33, "top_k": 3, "renormalize": False, "scale": 2.446},
    "1,024 experts": {"experts": 1024, "top_k": 16},
}


def one_route(name, tokens=37) -> bool:
    """moe_route against float64; a choice may differ where two lie within a float32's rounding."""
    options = dict(ROUTES[name])
    E, K = options.pop("experts"), options["top_k"]
    rng = np.random.default_rng(E)
    logits = rng.standard_normal((tokens, E)).astype(np.float32)
    bias = rng.uniform(6.817, 7.063, E).astype(np.float32)
    chosen, weights = moe_route(mx.array(logits), mx.array(bias), runner=RUNNER, **options)
    x = logits.astype(np.float64)
    score = 1 / (1 + np.exp(-x))
    if options.get("activation") == "softmax":
        score = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    choice = score + bias
    if "groups" in options:
        best = np.sort(choice.reshape(tokens, options["groups"], -1), -1)[..., -2:].sum(-1)
        kept = np.argsort(np.argsort(-best, -1), -1) < options["kept_groups"]
        choice = np.where(np.repeat(kept, E // options["groups"], -1), choice, -np.inf)
    rows = np.arange(tokens)[:, None]
    chosen, weights = np.array(chosen).astype(int), np.array(weights)
    gap = np.sort(choice, -1)[:, ::-1][:, :K] - choice[rows, chosen]
    share = score[rows, chosen]
    if options.get("renormalize", True):
        share = share / share.sum(-1, keepdims=True)
    error = float(np.abs(weights / (share * options.get("scale", 1.0)) - 1).max())
    distinct = all(len(set(row)) == K for row in chosen)
    ok = distinct and float(np.abs(gap).max()) < 2e-6 and error < 3e-6
    say(test=f"moe_route, {name}", gap=float(np.abs(gap).max()), weights=error, ok=ok)
    return ok


def one_group(group) -> bool:
    worst = on_cuda.lanes(group)
    ok = not any(worst.values())
    say(test="lanes", threadgroup=group, wrong={k: v for k, v in worst.items() if v}, ok=ok)
    return ok


def one_matrices() -> bool:
    """Every pair of operand types: errors of a few units in the last place of float32."""
    kinds = (mx.float32, mx.float16, mx.bfloat16)
    results = {f"{a} {b}": on_cuda.matrices(a, b) for a in kinds for b in kinds}
    worst = float(np.max([error for error, _ in results.values()]))
    ok = worst < 2e-7 and all(held for _, held in results.values())
    say(test="matrices", worst=worst, layout=all(held for _, held in results.values()), ok=ok)
    return ok


# Tokens, dtype of the 48B's experts: gate and up are past 2 GiB merged and, in float32, one by one.
EXPERTS = ((2048, "bfloat16"), (1, "bfloat16"), (256, "float32"), (1, "float32"))


def one_experts(T, dtype, E=256, D=2304, k=8) -> bool:
    """Experts past 2 GiB, as a model applies them, by the last ones' rows."""
    layer = MoE(D, 1024, E, top_k=k)
    layer.set_dtype(getattr(mx, dtype))
    layer.merge()
    rng = np.random.default_rng(T)
    chosen = np.stack([rng.permutation(E)[:k] for _ in range(T)])
    chosen[0] = np.arange(E - k, E)
    x = mx.array(rng.standard_normal((1, T, D)).astype(np.float32)).astype(getattr(mx, dtype))
    y = layer.switch_mlp(x, mx.array(chosen.astype(np.uint32))[None])
    weights = [layer.switch_mlp[f"{name}_proj"].weight for name in ("gate", "up", "down")]
    errors = []
    for row in {0, T // 2, T - 1}:
        for i, expert in enumerate(chosen[row].tolist()):
            gate, up, down = (numpy(w[expert]).astype(np.float64) for w in weights)
            v = numpy(x[0, row]).astype(np.float64)
            truth = down @ (gate @ v * layer64.sigmoid(gate @ v) * (up @ v))
            errors.append(oracle.error(numpy(y[0, row, i]), truth))
    ok = all(e < {"float32": 1e-5, "bfloat16": 1e-2}[dtype] for e in errors)
    say(test="experts", T=T, dtype=dtype, worst=float(np.max(errors)), ok=ok)
    return ok


def one_layer(T, Dk, Dv, dtype, bound, B=2) -> bool:
    """A ragged step through kda_decode, its projections and gates through prologue and epilogue."""
    layer = layer64.make(B=B, T=T, H=1, Hv=2, Dk=Dk, Dv=Dv, lower_bound=bound,
                         rounded=rounded(dtype), seed=T)  # fmt: skip
    lengths = [T, T // 2]
    truth = layer.run(lengths)
    kind = getattr(mx, dtype)
    p, w, past = (
        projections(layer, dtype=dtype),
        parameters(layer, dtype),
        layer_state(layer, dtype),
    )
    y, mem = step(layer, past, dtype=dtype, lengths=mx.array(lengths), keep=True, runner=RUNNER)
    qkv, _ = kda_prologue(p, w, past, runner=RUNNER)
    errors = [oracle.error(numpy(y), truth[0]), oracle.error(numpy(mem.state)[:, -1], truth[1])]
    errors += [oracle.error(numpy(x), t) for x, t in zip(qkv, layer.mixed(), strict=True)]
    windows = all(np.array_equal(numpy(a), np.float32(b))
                  for a, b in zip(mem[:3], truth[2], strict=True))  # fmt: skip
    rows = mx.array(layer.z.shape[1:2] * B)
    z = f32(layer.z).astype(kind)
    out = kda_epilogue(z, z, w, lengths=rows, runner=RUNNER)
    norm = np.sqrt((layer.z**2).mean(-1, keepdims=True) + layer.eps)
    gated = layer.z / norm * layer.weight * layer64.sigmoid(layer.z)
    errors.append(oracle.error(numpy(out), gated))
    limit = {"float32": 2e-6, "float16": 4e-4, "bfloat16": 3e-3}[dtype]
    ok = windows and errors[1] < 2e-6 and all(e < limit for e in errors)
    say(test="decode", T=T, Dk=Dk, Dv=Dv, dtype=dtype, y=errors[0], state=errors[1],
        prologue=errors[2:5], epilogue=errors[5], windows=windows, ok=ok)  # fmt: skip
    return ok


def sanitize(part: int = 0, parts: int = 1) -> bool:
    """Small ragged calls of every kernel: odd sizes, tails, Hv > H, both operand types."""
    plain_cuda.use()
    sizes = ((32, 64), (96, 32), (128, 64))
    calls = [partial(one_prefill, mode, Dk, Dv) for Dk, Dv in sizes for mode in MODES]
    calls += [partial(one_layer, 3, 64, 32, "float32", None)]
    calls += [partial(one_layer, 5, 256, 192, "float16", -5.0)]
    calls += [partial(raw_prefill, kernel) for kernel in OPS]
    calls += [partial(one_route, name, tokens=3) for name in ("groups", "softmax")]
    return some(calls, part, parts)


def plant(tool: str) -> bool:
    plain_cuda.use()
    on_cuda.plant(tool)
    return True


def findings(*logs: str) -> bool:
    """Sums up compute-sanitizer's logs; a log without its last line or its run's is no verdict."""
    count, whole = sanitizer.read(map(Path, logs))
    say(findings=dict(count), logs=len(logs), whole=whole)
    return whole and not count["ours"]


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
    got = OPS[kernel](q, k, v, f32(layer.a), f32(layer.b), state=f32(layer.state),
                      gate=gate_of(layer), beta_kind="sigmoid", runner=RUNNER)  # fmt: skip
    truth = oracle.recurrence(*layer.mixed(), layer.gate(), layer.beta(), state=layer.state)
    errors = [oracle.error(numpy(x), t) for x, t in zip(got, truth, strict=True)]
    ok = all(e < 2e-6 for e in errors)
    say(test=f"raw gate, {kernel}", o=errors[0], state=errors[1], ok=ok)
    return ok


if __name__ == "__main__":
    commands = {"check": check, "sanitize": sanitize, "plant": plant, "findings": findings}
    given = sys.argv[2:]
    passed = commands[sys.argv[1]](*(map(int, given) if all(map(str.isdigit, given)) else given))
    say(what=sys.argv[1], runner=RUNNER, mlx=mx.__version__, passed=bool(passed))
    sys.exit(0 if passed else 1)
