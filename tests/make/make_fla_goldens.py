"""Makes tests/goldens-fla and tests/tiny_fla_golden.npz: logits of FLA's own KDA models, float64.

Needs torch, transformers, triton, fla-core and flash-linear-attention 0.6.0, and sentencepiece; no
GPU. Run ``python tests/make/make_fla_goldens.py``; what it writes is committed. The same seeds give
the same files.

FLA's classes do everything but for what they leave to Triton kernels: short convolution, norms,
SwiGLU and the recurrence are plain PyTorch here, the recurrence checked against FLA's own naive
one. The trained checkpoint in examples/ is computed a second time by examples/train/model.py.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import fla.layers.kda as layer
import fla.modules.mlp as mlp
import numpy as np
import torch
import torch.nn.functional as F
from fla.models import KDAConfig, KDAForCausalLM
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_recurrent_kda
from torch import Tensor

TESTS = Path(__file__).parents[1]
OUT = TESTS / "goldens-fla"
TRAINED = TESTS.parent / "examples" / "tiny-fla-kda"
TRAIN = TESTS.parent / "examples" / "train"
VOCAB = 64
LENGTHS = (70, 19, 1)
ROWS = 16  # of each text of the trained checkpoint


@dataclass(frozen=True)
class Golden:
    """One random checkpoint: what differs from the base config, and how it is stored."""

    name: str
    changes: dict = field(default_factory=dict)
    float32: bool = False
    seed: int = 0


BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "fuse_norm": False,
    "fuse_swiglu": False,
}
GOLDENS = [
    Golden("plain", {"num_hidden_layers": 3}, seed=1),
    Golden("more-value-heads", {"num_v_heads": 6, "norm_eps": 1e-5}, seed=2),
    Golden("wide-values", {"expand_v": 2.0, "num_v_heads": 4, "conv_size": 3}, True, seed=3),
    Golden(
        "narrow-values-bounded",
        {"head_dim": 64, "expand_v": 0.5, "lower_bound": -3.0, "intermediate_size": None},
        seed=4,
    ),
    Golden(
        "negative-tied",
        {
            "allow_neg_eigval": True,
            "safe_gate": True,
            "lower_bound": -5.0,
            "tie_word_embeddings": True,
            "num_heads": 1,
        },
        seed=5,
    ),
    # Sizes that no kernel takes.
    Golden("odd-heads", {"num_heads": 3, "head_dim": 10, "expand_v": 1.2}, True, seed=6),
]


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options) -> tuple:
    """Stands for chunk_kda and fused_recurrent_kda, in the dtype of its inputs."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    A = options["A_log"].view(-1, 1).exp()
    a = g + options["dt_bias"].view(g.shape[-2:])
    bound = options["lower_bound"]
    log_decay = -A * F.softplus(a) if bound is None else bound * torch.sigmoid(A * a)
    beta = torch.sigmoid(beta) * (2 if options["allow_neg_eigval"] else 1)
    if bound is None:
        theirs = naive_kda_gate(g, options["A_log"], options["dt_bias"])
    else:
        theirs = naive_kda_lowerbound_gate(g, options["A_log"], options["dt_bias"], bound)
    check, _ = naive_recurrent_kda(q, k, v, theirs, beta)
    share = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(share, dim=2) for x in (q, k))
    state = k.new_zeros(*v.shape[:1], *v.shape[2:], k.shape[-1])
    rows = []
    for t in range(q.shape[1]):
        state = state * log_decay[:, t].exp()[:, :, None, :]
        error = v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhv,bhk->bhvk", beta[:, t, :, None] * error, k[:, t])
        rows.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]) * k.shape[-1] ** -0.5)
    out = torch.stack(rows, dim=1)
    assert (check - out).abs().max() < 1e-4 * out.abs().max(), "FLA's naive recurrence differs"
    return out, None


def convolution(self, x: Tensor, **_) -> tuple:
    """Stands for ShortConvolution.forward."""
    taps = self.weight.shape[-1]
    y = F.conv1d(F.pad(x.mT, (taps - 1, 0)), self.weight, groups=x.shape[-1])
    return F.silu(y).mT, None


def gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
    """Stands for FusedRMSNormGated.forward."""
    y = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight
    return y * torch.sigmoid(gate)


layer.chunk_kda = layer.fused_recurrent_kda = recurrence
layer.ShortConvolution.forward = convolution
layer.FusedRMSNormGated.forward = gated_norm
mlp.swiglu = lambda x, y: F.silu(x) * y


@torch.no_grad()
def draw(model: KDAForCausalLM, seed: int) -> None:
    """Random weights that make every part of the layer matter."""
    rng = torch.Generator().manual_seed(seed)

    def uniform(p: Tensor, low: float, high: float) -> Tensor:
        return torch.rand(p.shape, generator=rng) * (high - low) + low

    for name, p in sorted(model.named_parameters()):
        if name.endswith("dt_bias"):
            p.copy_(uniform(p, -4, 1))
        elif name.endswith("A_log"):
            p.copy_(uniform(p, 0, 2))
        elif "norm" in name:
            p.copy_(uniform(p, 0.5, 1.5))
        elif name.endswith(".bias"):
            p.copy_(uniform(p, -1, 1))
        elif "embeddings" in name:
            p.copy_(torch.randn(p.shape, generator=rng))
        else:
            scale = 3.0 if "conv1d" in name else 1.0
            p.copy_(torch.randn(p.shape, generator=rng) * scale * p.shape[-1] ** -0.5)


@torch.no_grad()
def make(golden: Golden) -> None:
    """Write one random checkpoint as FLA saves it, and its logits."""
    model = KDAForCausalLM(KDAConfig(**BASE | golden.changes)).eval()
    draw(model, golden.seed)
    model.to(torch.float32 if golden.float32 else torch.bfloat16)
    folder = OUT / golden.name
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    model = KDAForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    rng = np.random.default_rng(golden.seed)
    tokens = [rng.integers(0, VOCAB, n) for n in LENGTHS]
    logits = [model(torch.from_numpy(ids)[None], use_cache=False).logits[0] for ids in tokens]
    np.savez_compressed(
        folder / "golden.npz",
        tokens=np.concatenate(tokens).astype(np.int32),
        lengths=np.array(LENGTHS),
        logits=torch.cat(logits).numpy().astype(np.float32),
    )
    print(golden.name, sum(p.numel() for p in model.parameters()))


@torch.no_grad()
def make_trained() -> None:
    """Logits of the trained checkpoint on a chat and on running text, computed in two ways."""
    sys.path.insert(0, str(TRAIN))
    from chat import SentencePieceTokenizer
    from export import FLA_NAMES
    from model import Model, pure_kda
    from safetensors.torch import load_file

    tokenizer = SentencePieceTokenizer(TRAINED / "tokenizer.model")
    plain = Model(pure_kda(tokenizer.size))
    tensors = {}
    for name, tensor in load_file(TRAINED / "model.safetensors").items():
        for mine, theirs in FLA_NAMES:
            name = name.replace(f".{theirs}.", f".{mine}.")
        tensors[name] = tensor.view(1, 1, -1, 1) if name.endswith("A_log") else tensor
    plain.load_state_dict(tensors)
    settings = {"fuse_norm": False, "fuse_swiglu": False}
    model = KDAForCausalLM.from_pretrained(TRAINED, dtype=torch.float64, **settings).eval()
    chat = [("user", "What is an anchor?"), ("assistant", "A mechanical device that prevents")]
    prose = (TRAIN / "held_out.txt").read_text()[:600]
    result = {}
    for number, ids in enumerate((tokenizer.prompt(chat)[:-2], tokenizer.encode(prose))):
        want = model(torch.tensor([ids]), use_cache=False).logits[0]
        other = plain(torch.tensor([ids]))[0]
        off = ((want - other).abs().max() / want.abs().max()).item()
        print(f"text {number}: {len(ids)} tokens, FLA and model.py differ by {off:.1e}")
        assert off < 1e-5
        result[f"tokens_{number}"] = np.array(ids, dtype=np.int32)
        result[f"logits_{number}"] = want[-ROWS:].numpy().astype(np.float32)
    np.savez_compressed(TESTS / "tiny_fla_golden.npz", **result)


if __name__ == "__main__":
    for one in GOLDENS:
        make(one)
    make_trained()
