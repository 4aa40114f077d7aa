"""Train the tiny Kimi Linear checkpoint in pieces of a few minutes on one CUDA machine.

    python train.py --data ../../.train --out OUT --minutes 8 --total-steps 6000
    python train.py --data ../../.train --out OUT --minutes 5 --total-steps 6000 --resume OUT

A piece ends at its time limit or at the last step and leaves float32 weights in OUT
(model-*.safetensors, state.json, log.jsonl). The optimizer's moments are not kept: a resumed
piece warms up again for a few steps. Batches depend on the seed and the step alone.
"""

import argparse
import json
import math
import os
import platform
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from checks import Case, accuracy, gloss_cases, pass_key_cases, per_byte, turn_cases
from kernels import few_configurations
from model import Config, Model, pure_kda
from optim import Optimizer
from safetensors.torch import load_file, save_file
from tasks import Corpus, batch
from torch.utils.data import DataLoader, Dataset

# Share of the planned steps at which a mixture of row lengths begins.
CURRICULUM = (
    (0.00, {256: 0.5, 512: 0.5}),
    (0.05, {512: 0.6, 1024: 0.4}),
    (0.20, {512: 0.4, 1024: 0.3, 2048: 0.3}),
    (0.45, {512: 0.3, 1024: 0.2, 2048: 0.25, 4096: 0.15, 8192: 0.1}),
    (0.75, {512: 0.3, 2048: 0.2, 4096: 0.2, 8192: 0.3}),
)
DECAY_FROM = 0.6  # share of the steps after which the learning rate falls linearly to zero
WARMUP = 100
BALANCE_RATE = 2e-3


class Steps(Dataset):
    """One item a training step: ids and weights [rows, length] as torch tensors."""

    def __init__(self, corpus: Corpus, seed: int, tokens: int, total: int, toy: bool):
        self.corpus, self.seed, self.tokens, self.total, self.toy = corpus, seed, tokens, total, toy

    def __len__(self) -> int:
        return self.total

    def length(self, step: int) -> int:
        """The row length of a step."""
        mixture = [m for share, m in CURRICULUM if step >= share * self.total][-1]
        rng = random.Random(f"length-{self.seed}-{step}")
        length = rng.choices(list(mixture), list(mixture.values()))[0]
        return length // 16 if self.toy else length

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.length(step)
        rows = max(1, self.tokens // length)
        ids, weights = batch(self.corpus, self.seed * 10_000_000 + step, rows, length)
        return torch.from_numpy(ids), torch.from_numpy(weights)


def loader(steps: Steps, first: int, workers: int) -> DataLoader:
    """Batches from step `first` on, in order, made by `workers` processes."""
    return DataLoader(
        steps,
        batch_size=None,
        sampler=range(first, len(steps)),
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4 if workers else None,
    )


def weighted_loss(model: Model, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood, each token by its weight."""
    # Shift the targets, not the inputs: rows stay a multiple of the kernels' chunk.
    target, weight = ids.roll(-1, 1).flatten(), weights.roll(-1, 1)
    weight = torch.cat([weight[:, :-1], torch.zeros_like(weight[:, :1])], 1).flatten()
    logits = model(ids).flatten(0, 1)
    loss = F.cross_entropy(logits.float(), target, reduction="none")
    return (loss * weight).sum() / weight.sum()


def save(model: Model, folder: Path, state: dict) -> None:
    """Float32 weights in files of at most 15 MB, then state.json, each renamed into place."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in model.state_dict().items():
        size = sum(t.nbytes for t in shards[-1].values())
        if size + tensor.nbytes > 15_000_000:
            shards.append({})
        shards[-1][name] = tensor.detach().cpu().contiguous()
    for number, shard in enumerate(shards):
        temporary = folder / f"model-{number}.tmp"
        save_file(shard, temporary)
        temporary.rename(folder / f"model-{number}.safetensors")
    temporary = folder / "state.tmp"
    temporary.write_text(json.dumps({**state, "shards": len(shards)}, indent=1))
    temporary.rename(folder / "state.json")


def load(model: Model, folder: Path) -> dict:
    """Load what `save` wrote; returns the state."""
    state = json.loads((folder / "state.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for number in range(state["shards"]):
        tensors |= load_file(folder / f"model-{number}.safetensors")
    model.load_state_dict(tensors)
    return state


def rate(step: int, total: int, peak: float, since_start: int) -> float:
    """Warm-up after every (re)start, constant, then linear to zero."""
    left = (total - step) / max(1.0, total * (1 - DECAY_FROM))
    return peak * min(1.0, (since_start + 1) / WARMUP, left)


class Judge:
    """Runs the torch model for checks.py, cases of like length together."""

    def __init__(self, model: Model, device: torch.device):
        self.model, self.device = model, device

    @torch.inference_mode()
    def __call__(self, cases: list[Case]) -> list[np.ndarray]:
        """Arg max tokens for the positions of each answer."""
        found: list[np.ndarray] = [np.empty(0)] * len(cases)
        order = sorted(range(len(cases)), key=lambda i: len(cases[i].ids))
        while order:
            size = max(1, 65536 // len(cases[order[min(len(order), 256) - 1]].ids))
            some, order = order[: min(size, 256)], order[min(size, 256) :]
            width = max(len(cases[i].ids) for i in some)
            ids = torch.zeros(len(some), width, dtype=torch.long)
            for row, i in enumerate(some):  # padding on the right changes nothing before it
                ids[row, : len(cases[i].ids)] = torch.tensor(cases[i].ids)
            hidden = self.model.hidden(ids.to(self.device))
            for row, i in enumerate(some):
                part = hidden[row, cases[i].start - 1 : len(cases[i].ids) - 1]
                found[i] = self.model.lm_head(part).argmax(-1).cpu().numpy()
        return found

    @torch.inference_mode()
    def nats(self, ids: list[int]) -> float:
        """Sum of the negative log-likelihoods of all tokens but the first."""
        tokens = torch.tensor([ids], device=self.device)
        logits = self.model(tokens[:, :-1]).float()
        return F.cross_entropy(logits[0], tokens[0, 1:], reduction="sum").item()


def evaluate(model: Model, corpus: Corpus, device: torch.device, lengths: dict, glosses) -> dict:
    """The checks of checks.py, as numbers. `lengths` maps a prompt length to a sample size."""
    model.eval()
    judge = Judge(model, device)
    words = gloss_cases(corpus, glosses)
    result: dict = {"glosses": accuracy(judge, words), "pass_key": {}}
    result["counts"] = {"glosses": len(words), "facts": 50, "pairs": 50, "pass_key": lengths}
    text = corpus.held_out
    result["held_out_bits_per_byte"] = per_byte(judge.nats(corpus.tokenizer.encode(text)), text)
    result["facts"] = accuracy(judge, turn_cases(corpus, "facts", 50, 300))
    result["pairs"] = accuracy(judge, turn_cases(corpus, "pairs", 50, 300))
    for length, count in lengths.items():
        result["pass_key"][length] = accuracy(judge, pass_key_cases(corpus, length, count))
        print(f"pass key {length}: {result['pass_key'][length]:.2f}", flush=True)
    model.train()
    return result


def versions() -> dict:
    """Versions of what the run depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        import fla
        import triton

        found |= {"triton": triton.__version__, "fla": fla.__version__}
        found |= {"device": torch.cuda.get_device_name()}
    return found


def compare_paths(model: Model, corpus: Corpus, device: torch.device) -> None:
    """Stop unless the kernels and plain PyTorch agree on logits and on a gradient."""
    ids, weights = (torch.from_numpy(a) for a in batch(corpus, 7, 2, 200))
    plain = Model(model.config)
    plain.load_state_dict(model.state_dict())
    weighted_loss(plain, ids, weights).backward()
    with torch.autocast(device.type, torch.bfloat16):
        fast = model(ids.to(device)).float().cpu()
        weighted_loss(model, ids.to(device), weights.to(device)).backward()
    slow = plain(ids).detach()
    off = {"logits": ((fast - slow).norm() / slow.norm()).item()}
    other = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        if "layers.1.self_attn" in name:
            want = other[name].grad
            off[name] = ((p.grad.cpu() - want).norm() / (want.norm() + 1e-12)).item()
        p.grad = None
    for router in model.routers():
        router.load.zero_()
    worst = max(off, key=off.get)
    print(
        f"kernels against plain PyTorch: logits {off['logits']:.4f}, worst {worst} {off[worst]:.4f}"
    )
    # bfloat16 against float32: a few per cent, more where the router changes its mind.
    if off["logits"] > 0.15 or off[worst] > 0.6:
        sys.exit(f"the kernels disagree with plain PyTorch: {off}")


def main() -> None:
    """One piece of training."""
    started = time.time()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder made by prepare.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--resume", type=Path, help="folder of an earlier piece")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of this piece")
    parser.add_argument("--total-steps", type=int, default=6000, help="steps of all pieces")
    parser.add_argument("--tokens", type=int, default=131072, help="tokens per step")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=min(12, max(0, (os.cpu_count() or 1) - 3)))
    parser.add_argument("--family", choices=("kimi", "kda"), default="kimi")
    parser.add_argument("--toy", action="store_true", help="toy size, for a test on a CPU")
    parser.add_argument("--evaluate", choices=("none", "quick", "full"), default="quick")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        few_configurations()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    corpus = Corpus(args.data, args.family)
    config = {"kimi": Config, "kda": pure_kda}[args.family](corpus.tokenizer.size)
    if args.toy:
        config = replace(config, hidden=64, heads=1, expert_hidden=16, dense_hidden=64, kv_lora=32)
    model = Model(config)
    model.reset(args.seed)
    step, spent = 0, 0.0
    if args.resume:
        state = load(model, args.resume)
        step, spent = state["step"], state["seconds"]
    # Workers are forked before CUDA starts in this process.
    steps = Steps(corpus, args.seed, args.tokens, args.total_steps, args.toy)
    batches = iter(loader(steps, step, args.workers))
    waiting = next(batches, None)
    model.to(device)
    info = {"versions": versions(), "arguments": {k: str(v) for k, v in vars(args).items()}}
    print(json.dumps(info), flush=True)
    compare_paths(model, corpus, device)
    print(f"ready after {time.time() - started:.0f} s; from step {step}", flush=True)

    optimizer = Optimizer(model)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / "log.jsonl").open("a")
    begin, first, seen, losses = time.time(), step, 0, []
    reserve = 0.0 if args.evaluate == "none" else (15.0 if args.evaluate == "quick" else 60.0)
    model.train()
    while waiting is not None and time.time() - started + reserve < args.minutes * 60:
        ids, weights = (t.to(device, non_blocking=True) for t in waiting)
        lr = rate(step, args.total_steps, args.lr, step - first)
        with autocast:
            loss = weighted_loss(model, ids, weights)
        loss.backward()
        norm = optimizer.step(lr)
        for router in model.routers():
            router.balance(BALANCE_RATE * min(1.0, lr / args.lr + 0.01))
        step, seen = step + 1, seen + ids.numel()
        losses.append((ids.shape[1], loss.detach()))
        early = step - first == 20
        if step % 100 == 0 or early or step == args.total_steps:
            report(log, step, losses, norm, lr, seen / (time.time() - begin), started)
            losses = []
            if early:  # compilation and autotuning are done: count from here
                begin, seen = time.time(), 0
        if step % 2000 == 0:
            save(model, args.out, {**info, "step": step, "seconds": spent + time.time() - started})
        waiting = next(batches, None)
    state = {**info, "step": step, "seconds": spent + time.time() - started}
    save(model, args.out, state)
    print(f"saved at step {step} after {time.time() - started:.0f} s", flush=True)
    if args.evaluate != "none":
        lengths = {512: 20, 2048: 20, 8192: 20}
        if args.evaluate == "full":
            lengths = {1024: 100, 2048: 100, 4096: 100, 8192: 100, 16384: 50, 32768: 50, 65536: 40}
        if args.toy:
            lengths = {128: 2}
        glosses = {"quick": 200, "full": None}[args.evaluate]
        with autocast:
            result = evaluate(model, corpus, device, lengths, 4 if args.toy else glosses)
        result["training"] = state
        (args.out / "evaluation.json").write_text(json.dumps(result, indent=1))
        print(json.dumps(result), flush=True)
    print(f"done after {time.time() - started:.0f} s", flush=True)


def report(
    log, step: int, losses: list, norm: torch.Tensor, lr: float, speed: float, started
) -> None:
    """Write one line of the log; stop on a loss that is not finite."""
    by_length: dict[int, list[float]] = {}
    for length, loss in losses:
        by_length.setdefault(length, []).append(loss.item())
    mean = {length: sum(v) / len(v) for length, v in sorted(by_length.items())}
    line = {"step": step, "seconds": round(time.time() - started), "tokens_per_second": int(speed)}
    line |= {"lr": round(lr, 6), "norm": round(norm.item(), 3)}
    line |= {"loss": {k: round(v, 4) for k, v in mean.items()}}
    print(json.dumps(line), flush=True)
    log.write(json.dumps(line) + "\n")
    log.flush()
    if not all(math.isfinite(v) for v in mean.values()):
        sys.exit("the loss is not finite")


if __name__ == "__main__":
    main()
