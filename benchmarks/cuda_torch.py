"""Candidates of cuda_peers.py in PyTorch: FLA's Triton kernels and FlashKDA, as installed.

FlashKDA's wheels are built for one version of PyTorch each and do not check it: with another one
every call ends with "all tensors must be on CUDA". For PyTorch 2.11 take tokenspeed-flashkda
0.0.1.post20260729.
"""

import importlib.util
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from cuda_peers import LOWER_BOUND, Candidate

from mlx_kda.errors import UserError
from mlx_kda.ops.reference64 import Inputs


def check() -> None:
    """UserError where PyTorch has no CUDA GPU; keeps Triton's tuning short."""
    if not torch.cuda.is_available():
        raise UserError("the torch candidates need PyTorch's CUDA build and a CUDA GPU")
    _few_configurations()


def release() -> None:
    """Give memory kept for later back, for the other framework."""
    torch.cuda.empty_cache()


def candidates(x: Inputs, heads: int) -> Iterator[Candidate]:
    """FLA's two forms in bfloat16 and float32, and FlashKDA where it is installed."""
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    T = x.q.shape[1]
    for dtype in ("bfloat16", "float32"):
        kind = getattr(torch, dtype)
        small = [torch.from_numpy(np.array(a)).to(kind) for a in (x.q, x.k, x.v, x.beta)]
        given = [a.float().numpy() for a in small]
        rounded = Inputs(*given[:3], x.g, given[3])
        q, k, v, beta = (_over_heads(a, heads) for a in small)
        g = _over_heads(torch.from_numpy(np.array(x.g)), heads)
        forms = {"FLA chunk_kda": chunk_kda} if T > 1 else {}
        forms["FLA fused_recurrent_kda"] = fused_recurrent_kda
        for name, form in forms.items():
            call = partial(form, q, k, v, g, beta, output_final_state=True)
            yield Candidate(name, dtype, rounded, _inference(call), _wait, _read)
    if T > 1 and importlib.util.find_spec("flash_kda"):
        yield _flash(x, heads)


def _flash(x: Inputs, heads: int) -> Candidate:
    """FlashKDA takes raw gates and strengths in bfloat16 and normalises q and k itself."""
    import flash_kda

    def logit(p: np.ndarray) -> np.ndarray:
        p = np.clip(np.asarray(p, np.float64), 1e-9, 1 - 1e-9)
        return np.log(p) - np.log1p(-p)

    raw = [x.q, x.k, x.v, logit(x.g / LOWER_BOUND), logit(x.beta)]
    small = [torch.from_numpy(np.ascontiguousarray(a)).to(torch.bfloat16) for a in raw]
    q, k, v, a, b = (s.double().numpy() for s in small)
    unit = [z / np.sqrt((z**2).sum(-1, keepdims=True) + 1e-6) for z in (q, k)]
    given = Inputs(*unit, v, LOWER_BOUND / (1 + np.exp(-a)), 1 / (1 + np.exp(-b)))
    q, k, v, a, b = (_over_heads(s, heads) for s in small)
    D = q.shape[-1]
    o = torch.empty_like(v)
    A_log = torch.zeros(heads, device="cuda")
    bias = torch.zeros(heads, D, device="cuda")
    start = torch.zeros(1, heads, D, D, device="cuda")
    final = torch.empty_like(start)

    def call():
        flash_kda.fwd(q, k, v, a, b, D**-0.5, o, A_log, bias, LOWER_BOUND, start, final)
        return o, final

    def read(result):
        o, S = result
        return o[:, :, :2].float().cpu().numpy(), S[:, :2].float().cpu().numpy()

    return Candidate("FlashKDA", "bfloat16", given, _inference(call), _wait, read)


def _few_configurations() -> None:
    """Make Triton's autotuner drop most configurations: FLA's take minutes for every shape.

    One warp count and one pipeline depth are kept, with every block size. Before fla is imported.
    """
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def fewer(configs: list) -> list:
        if not configs:
            return configs
        warps = min((c.num_warps for c in configs), key=lambda n: abs(n - 4))
        kept = [c for c in configs if c.num_warps == warps]
        stages = min(c.num_stages for c in kept)
        return [c for c in kept if c.num_stages == stages]

    def init(self, fn, arg_names, configs, *rest, **named):
        original(self, fn, arg_names, fewer(configs), *rest, **named)

    Autotuner.__init__ = init


def _inference(call):
    def run():
        with torch.inference_mode():
            return call()

    return run


def _wait(_) -> None:
    torch.cuda.synchronize()


def _over_heads(a: torch.Tensor, heads: int) -> torch.Tensor:
    """[1, T, 2, ...] repeated to [1, T, heads, ...] on the GPU."""
    return a.cuda().repeat(1, 1, heads // 2, *([1] * (a.ndim - 3)))


def _read(result) -> tuple[np.ndarray, np.ndarray]:
    o, S = result  # FLA's state is [B, H, K, V]
    return o[:, :, :2].float().cpu().numpy(), S[:, :2].float().transpose(-1, -2).cpu().numpy()
