"""What computes a KDA layer between its projections: one kernel, a few, or MLX operations.

::

    q, k, v = silu(conv(x));  q, k unit length;  g = gate(a);  beta = sigmoid(b)
    o = kda(q, k, v, g, beta);  y = o / sqrt(mean o^2 + eps) * norm_weight * sigmoid(z)

`choose` decides once for a kind of call; what it returns computes such calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from ..attention import choose_operations, kda
from ..kernels import chunk, decode, prologue
from ..kernels.arguments import LayerParameters, LayerState, Projections
from ..kernels.chunk import kda_chunk
from ..kernels.decode import kda_decode
from ..kernels.epilogue import kda_epilogue
from ..kernels.prologue import kda_prologue
from ..kernels.recurrent import kda_recurrent
from ..ops import l2norm
from ..ops.elementwise import gated
from ..ops.gates import Gate, write_strength
from ..ops.inputs import CheckedInputs
from .conv import short_conv
from .norm import rms_norm
from .padding import Padding

# Up to this many tokens a chunk of 16 would be mostly padding.
SHORT = 16


@dataclass(frozen=True)
class LayerCall:
    """What computes a kind of call, and why. Calling it computes one.

    Args:
        p, w, past: the layer's projections, parameters and state.
        padding: what of a batch is not real, if anything.

    Returns:
        (y, state): y [B, T, Hv, Dv] for the output projection, and the next layer state.
    """

    path: str
    reason: str
    runner: str = "ops"

    @property
    def kernel(self) -> str | None:
        """The kernel, "kda_decode", "kda_recurrent" or "kda_chunk"; None: MLX operations."""
        return None if self.runner == "ops" else self.path

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"

    def __call__(
        self,
        p: Projections,
        w: LayerParameters,
        past: LayerState,
        padding: Padding | None = None,
    ) -> tuple[mx.array, LayerState]:
        raise NotImplementedError


class DecodeKernel(LayerCall):
    """A few tokens in one launch."""

    def __call__(
        self,
        p: Projections,
        w: LayerParameters,
        past: LayerState,
        padding: Padding | None = None,
    ) -> tuple[mx.array, LayerState]:
        lengths = None if padding is None else padding.lengths
        return kda_decode(p, w, past, lengths=lengths, runner=self.runner)


class PrefillKernels(LayerCall):
    """Prologue, recurrence and epilogue, each by kernels."""

    def __call__(
        self,
        p: Projections,
        w: LayerParameters,
        past: LayerState,
        padding: Padding | None = None,
    ) -> tuple[mx.array, LayerState]:
        lengths = None if padding is None else padding.lengths
        qkv, windows = kda_prologue(p, w, past, lengths=lengths, runner=self.runner)
        x = CheckedInputs(
            *(*qkv, p.a, p.b),
            state=past.state,
            lengths=lengths,
            gate=w.gate,
            beta_kind=w.beta_kind,
        )
        op = kda_chunk if self.path == "kda_chunk" else kda_recurrent
        o, state = op(x, runner=self.runner)
        y = kda_epilogue(o, p.z, w, lengths=lengths, runner=self.runner)
        return y, LayerState.of(windows, state)


class Operations(LayerCall):
    """MLX operations, differentiable; ``path`` is that of the recurrence."""

    def __call__(
        self,
        p: Projections,
        w: LayerParameters,
        past: LayerState,
        padding: Padding | None = None,
    ) -> tuple[mx.array, LayerState]:
        if self.path != "step" or p.b.shape[1] != 1 or padding is not None or w.gate is None:
            return _operations(p, w, past, padding, self.path)
        sizes = (*w[:4], w.eps, w.beta_kind, w.gate.lower_bound)
        arrays = (*p, *past, *w.conv_weight, w.norm_weight, w.gate.A_log, w.gate.dt_bias)
        y, *state = _one_token(*sizes)(*arrays)
        return y, LayerState(*state)


@lru_cache(maxsize=1024)
def choose(
    T: int,
    Dk: int,
    Dv: int,
    conv_kernel: int,
    dtype: mx.Dtype,
    runner: str,
    training: bool = False,
) -> LayerCall:
    """What computes T tokens of a layer of these sizes, with its reason.

    Args:
        dtype: of the activations.
        runner: "ops" or the runner of the kernels, as `attention.resolve` gives it.
        training: whether gradients are needed, which the kernels do not have.
    """
    operations = choose_operations(T)
    if runner == "ops":
        return Operations(operations.path, operations.reason)
    if training:
        why = "training needs gradients, which the kernels do not have"
        return Operations(operations.path, why)
    if T == 0:
        return Operations(operations.path, "there are no tokens")
    if T <= decode.MAX_TOKENS:
        ok, reason = decode.supported(Dk, Dv, dtype, T, conv_kernel)
        why = f"T = {T} is at most {decode.MAX_TOKENS}: one launch for it all"
        call: LayerCall = DecodeKernel("kda_decode", why, runner)
    else:
        ok, reason = prologue.supported(Dk, Dv, dtype, conv_kernel)
        if T <= SHORT:
            why = f"T = {T} would hardly fill a chunk of {chunk.CHUNK}"
            call = PrefillKernels("kda_recurrent", why, runner)
        else:
            why = f"T = {T}: chunks of {chunk.CHUNK} tokens"
            call = PrefillKernels("kda_chunk", why, runner)
    return call if ok else Operations(operations.path, reason)


@lru_cache(maxsize=64)
def _one_token(
    H: int, Hv: int, Dk: int, Dv: int, eps: float, beta_kind: str, lower_bound: float | None
) -> Callable[..., tuple[mx.array, ...]]:
    """`_operations` of one token as a compiled function of arrays: calling them takes longer."""

    @mx.compile
    def call(*arrays: mx.array) -> tuple[mx.array, ...]:
        p, past = Projections(*arrays[:6]), LayerState(*arrays[6:10])
        q, k, v, norm_weight, A_log, dt_bias = arrays[10:]
        gate = Gate(A_log, dt_bias, lower_bound)
        w = LayerParameters(H, Hv, Dk, Dv, (q, k, v), gate, norm_weight, eps, beta_kind)
        y, state = _operations(p, w, past, None, "step")
        return y, *state

    return call


def _operations(
    p: Projections,
    w: LayerParameters,
    past: LayerState,
    padding: Padding | None,
    path: str,
) -> tuple[mx.array, LayerState]:
    inputs = zip(p[:3], w.conv_weight, past[:3], strict=True)
    (q, k, v), windows = zip(*(short_conv(*each, padding) for each in inputs), strict=True)
    q, k = (l2norm(x.reshape(*x.shape[:2], w.H, w.Dk)) for x in (q, k))
    g = p.a if w.gate is None or p.a is None else w.gate.log_decay(p.a)
    o, state = kda(
        *(q, k, v.reshape(p.z.shape), g, write_strength(p.b, w.beta_kind)),
        state=past.state,
        lengths=None if padding is None else padding.lengths,
        path=path,
    )
    y = gated(rms_norm(o, w.norm_weight, w.eps), p.z.astype(o.dtype))
    return y, LayerState.of(windows, state)
