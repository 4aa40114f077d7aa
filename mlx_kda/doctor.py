"""The self-check: a model's kernels against MLX's operations, before their first use on a machine.

A GPU may drop a launch that is too large, and a fast-math compiler may undo a careful sum, both
silently. So each kernel that a model needs computes what the operations compute, and if one fails,
none is used.
"""

import contextlib
import hashlib
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from . import __version__, format
from .errors import UserError
from .files import cache_dir, write_text
from .kernels.arguments import LayerParameters, LayerState, Projections
from .kernels.sources import MOE_SOURCES, SOURCES
from .layers import KimiDeltaAttention, MoE
from .layers.mix import SHORT, LayerCall, Operations

# Tokens of the check of each kernel: decode of one token and of its most, the recurrent kernel, and
# three chunks with a tail.
LENGTHS = (1, 8, 16, 45)
# Norm of the difference over norm of the operations' result, by dtype of the activations. float32:
# two paths of a few 1e-7 each. 16 bit: the paths round q, k, v and o at different places.
BOUNDS = {mx.float32: 5e-6, mx.float16: 5e-3, mx.bfloat16: 4e-2}
NONE = "no kernel"


@dataclass(frozen=True)
class Verdict:
    """What the check of one kernel found."""

    kernel: str
    tokens: int
    error: float | None  # None where the kernel did not run
    bound: float
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Right, or without a kernel: then the operations run, which is not a fault."""
        return self.kernel == NONE or (self.error is not None and self.error <= self.bound)


def check_model(model: Any, dtype: mx.Dtype, runner: str) -> Iterator[Verdict]:
    """The kernels that a model needs: those of its KDA layers and of its routers."""
    if model.kda_layers:
        yield from check(model.kda_layers[0], dtype, runner)
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            yield check_router(layer.mlp, runner)
            return


def check(layer: KimiDeltaAttention, dtype: mx.Dtype, runner: str) -> Iterator[Verdict]:
    """Each kernel that ``layer`` needs against the operations, as the verdicts come.

    The inputs are the layer's own weights and projections with similar keys, from a state that is
    not empty; output, state and windows are compared.
    """
    for T in LENGTHS:
        call = layer.choose(T, dtype, runner)
        if call.kernel is None:
            yield Verdict(NONE, T, None, BOUNDS[dtype], call.reason)
        else:
            yield _check_one(layer, call, T, dtype)


def check_router(moe: MoE, runner: str) -> Verdict:
    """The router's kernel against its operations on 16 tokens.

    The scores of the chosen experts and the weights must agree: two experts with equal scores may
    change places.
    """
    T, E, bound = 16, moe.e_score_correction_bias.size, BOUNDS[mx.float32]
    if not moe.by_kernel(runner):
        return Verdict(NONE, T, None, bound, "the router has no kernel for its sizes")
    rng = np.random.default_rng(E)
    logits = mx.array(rng.standard_normal((1, T, E)).astype(np.float32))
    truth = _routed(moe, logits, "ops")
    return _compare("moe_route", T, bound, lambda: _routed(moe, logits, runner), truth)


def _routed(moe: MoE, logits: mx.array, runner: str) -> list[np.ndarray]:
    """How good each token's choices are, and its weights, both in order."""
    chosen, weights = moe.route(logits, mx.float32, runner)
    scores = mx.sigmoid(logits) if moe.activation == "sigmoid" else mx.softmax(logits, axis=-1)
    values = mx.take_along_axis(scores + moe.e_score_correction_bias, chosen, axis=-1)
    return [np.sort(np.array(x, dtype=np.float64), axis=-1) for x in (values, weights)]


def _check_one(layer: KimiDeltaAttention, call: LayerCall, T: int, dtype: mx.Dtype) -> Verdict:
    inputs = _inputs(layer, T, dtype)
    # Token by token: matrix products in float32 are rounded to fewer bits on some GPUs.
    truth = _flat(*Operations("reference", "to compare with")(*inputs))
    return _compare(call.path, T, BOUNDS[dtype], lambda: _flat(*call(*inputs)), truth)


def _compare(
    kernel: str,
    T: int,
    bound: float,
    compute: Callable[[], list[np.ndarray]],
    truth: list[np.ndarray],
) -> Verdict:
    """The verdict on what a kernel computes."""
    try:
        got = compute()
    except UserError:  # this machine lacks what the runner needs
        raise
    except Exception as error:  # whatever a compiler or a GPU comes up with
        return Verdict(kernel, T, None, bound, _line(error))
    worst = max(_difference(g, t) for g, t in zip(got, truth, strict=True))
    reason = "" if worst <= bound else "differs from the operations"
    return Verdict(kernel, T, worst, bound, reason)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _inputs(
    layer: KimiDeltaAttention, T: int, dtype: mx.Dtype
) -> tuple[Projections, LayerParameters, LayerState]:
    rng = np.random.default_rng(T)
    H, Dk, Hv, Dv = layer.num_heads, layer.head_dim, layer.num_v_heads, layer.v_head_dim

    def draw(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32))

    common = draw(1, 1, H * Dk)
    q, k = (0.3 * draw(1, T, H * Dk) + common for _ in range(2))
    wide = [q, k, draw(1, T, Hv * Dv), draw(1, T, Hv, Dk), draw(1, T, Hv) + 2, draw(1, T, Hv, Dv)]
    windows = [draw(1, layer.conv_kernel - 1, x.shape[-1]).astype(dtype) for x in wide[:3]]
    p = Projections(*(x.astype(dtype) for x in wide))
    state = LayerState.of(windows, draw(1, Hv, Dv, Dk))
    return p, layer.kernel_parameters(), state


def _flat(y: mx.array, state: LayerState) -> list[np.ndarray]:
    arrays = [x.astype(mx.float32) for x in (y, *state)]
    mx.eval(arrays)
    return [np.array(x, dtype=np.float64) for x in arrays]


def _difference(x: np.ndarray, truth: np.ndarray) -> float:
    if x.shape != truth.shape or not np.isfinite(x).all():
        return float("inf")
    return float(np.linalg.norm(x - truth)) / max(float(np.linalg.norm(truth)), 1e-30)


def prepare(model: Any, dtype: mx.Dtype) -> list[Verdict]:
    """Check a model's kernels once on a machine and compile them; on a failure use operations.

    Does nothing where the model does not run on Metal. The verdicts are stored for this chip,
    macOS, MLX, package version, kernel source and kind of layer, in ``cache_dir()/checks.json``. A
    failure is reported on stderr, and the operations take over.

    Returns:
        The verdicts, remembered or new; [] where there was nothing to check.
    """
    if model.runner != "metal" or not model.kda_layers:
        return []
    key = _key(model, dtype)
    known = _remembered()
    if key in known:
        verdicts = [Verdict(**entry) for entry in known[key]]
    else:
        _say("checking the Metal kernels, once on this machine ...")
        verdicts = list(check_model(model, dtype, model.runner))
        _remember({**known, key: [asdict(v) for v in verdicts]})
    failed = [v for v in verdicts if not v.ok]
    if failed:
        why = describe(failed[0])
        _switch_off(model, why)
    elif key in known:  # the check compiles them all
        try:
            warm_up(model.kda_layers, dtype)
        except Exception as error:  # whatever a compiler comes up with
            _switch_off(model, f"a kernel did not compile: {_line(error)}")
    return verdicts


def _switch_off(model: Any, why: str) -> None:
    model.use_runner("ops", f"the self-check failed: {why}")
    _say(
        f"warning: Metal kernels are switched off and MLX's operations take over: {why} "
        "(mlx-kda doctor shows all)"
    )


def warm_up(layers: Sequence[KimiDeltaAttention], dtype: mx.Dtype) -> list[str]:
    """Compile every kernel that these layers will call, by one small call each.

    Layers that share an instantiation count once. A kernel that does not compile raises what its
    runner raises.

    Returns:
        What was compiled, by name.
    """
    kinds: dict[tuple, KimiDeltaAttention] = {}
    for layer in layers:
        w = layer.kernel_parameters()
        arrays = (*w.conv_weight, w.norm_weight, layer.A_log, layer.dt_bias)
        kinds.setdefault((_kind(layer), *(x.dtype for x in arrays)), layer)
    jobs = [(layer, T) for layer in kinds.values() for T in (1, SHORT, SHORT + 1)]
    done: list[str] = []
    for layer, T in jobs:
        call = layer.choose(T, dtype)
        if call.kernel is not None:
            what = f"{call.kernel} Dk={layer.head_dim} Dv={layer.v_head_dim}"
            if sys.stderr.isatty():
                _say(f"compiling kernel {len(done) + 1} of {len(jobs)}: {what}")
            mx.eval(call(*_inputs(layer, T, dtype)))
            done.append(what)
    return done


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def describe(verdict: Verdict) -> str:
    """One verdict as a line of text."""
    what = f"{verdict.kernel} on {format.tokens(verdict.tokens)}"
    if verdict.ok and verdict.error is not None:
        return f"{what}: error {verdict.error:.1e}, at most {verdict.bound:.0e}"
    if verdict.kernel == NONE:
        return f"{what}, MLX's operations run: {verdict.reason}"
    if verdict.error is None:
        return f"{what} did not run: {verdict.reason}"
    return f"{what} {verdict.reason}: error {verdict.error:.1e}, at most {verdict.bound:.0e}"


def machine() -> dict[str, str]:
    """What the verdicts depend on, by name."""
    chip = platform.machine()
    if mx.default_device().type == mx.DeviceType.gpu:
        chip = str(mx.device_info().get("device_name", chip))
    mac = platform.mac_ver()[0]
    return {
        "chip": chip,
        "system": f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}",
        "mlx": version("mlx"),
        "mlx-kda": __version__,
        "Metal": "yes" if mx.metal.is_available() else "no",
    }


def _key(model: Any, dtype: mx.Dtype) -> str:
    kind = f"{_kind(model.kda_layers[0])} {dtype}"
    routers = {
        f"{m.e_score_correction_bias.size} {m.top_k} {m.groups} {m.kept_groups} {m.activation}"
        for m in (each.mlp for each in model.layers)
        if isinstance(m, MoE)
    }
    return " | ".join([*machine().values(), _kernel_hash(), kind, *sorted(routers)])


def _kind(layer: KimiDeltaAttention) -> str:
    """What decides which instantiations a layer's kernels have, beside dtypes."""
    gate = "softplus" if layer.lower_bound is None else "bounded"
    beta = "twice" if layer.negative_eigenvalues else "sigmoid"
    sizes = f"{layer.head_dim} {layer.v_head_dim} {layer.num_v_heads // layer.num_heads}"
    return f"{sizes} {layer.conv_kernel} {gate} {beta}"


def _kernel_hash() -> str:
    sources = (SOURCES | MOE_SOURCES).values()
    text = "".join(source.header + source.body for source in sources)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _remembered() -> dict[str, Any]:
    try:
        found = json.loads((cache_dir() / "checks.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(verdicts: dict[str, Sequence[dict]]) -> None:
    """Write the file atomically; where it cannot be written, the check runs again next time."""
    path = cache_dir() / "checks.json"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(verdicts, indent=1) + "\n")
