"""Muon for the matrices of the blocks, AdamW for everything else.

Muon: momentum, then the update is made (nearly) orthogonal by five Newton-Schulz steps, and
scaled so that its entries have the size of an AdamW update (0.2 x the learning rate).
"""

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(x: Tensor) -> Tensor:
    """Newton-Schulz on a stack of matrices [N, rows, columns], in bfloat16 on CUDA."""
    a, b, c = COEFFICIENTS
    wide = x.shape[-2] <= x.shape[-1]
    y = x if wide else x.mT
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    y = y.bfloat16() if y.is_cuda else y
    for _ in range(5):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y if wide else y.mT).to(x.dtype)


class Muon:
    """Muon over matrices grouped by shape; parameters [E, rows, columns] are E matrices."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float, weight_decay: float):
        self.momentum, self.weight_decay = momentum, weight_decay
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in parameters:
            groups.setdefault(tuple(p.shape[-2:]), []).append(p)
        self.groups = list(groups.values())
        self.buffers = [[torch.zeros_like(p) for p in group] for group in self.groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from the gradients."""
        for group, buffers in zip(self.groups, self.buffers, strict=True):
            grads = [p.grad for p in group]
            torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
            ahead = torch._foreach_lerp(grads, buffers, self.momentum)
            shape = group[0].shape[-2:]
            sizes = [p.numel() // shape.numel() for p in group]
            stack = torch.cat([u.reshape(-1, *shape) for u in ahead])
            update = orthogonal(stack) * (0.2 * max(shape) ** 0.5)
            torch._foreach_mul_(group, 1 - lr * self.weight_decay)
            pieces = [u.view_as(p) for u, p in zip(update.split(sizes), group, strict=True)]
            torch._foreach_add_(group, pieces, alpha=-lr)


class Optimizer:
    """Both optimizers behind one `step`."""

    def __init__(self, model: nn.Module):
        matrices, tables, rest = [], [], []
        for name, p in model.named_parameters():
            if "embed_tokens" in name or "lm_head" in name:
                tables.append(p)
            elif p.dim() >= 2 and "conv1d" not in name and "A_log" not in name:
                matrices.append(p)
            else:
                rest.append(p)
        self.muon = Muon(matrices, momentum=0.95, weight_decay=0.1)
        self.adam = torch.optim.AdamW(
            [{"params": tables, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}],
            betas=(0.9, 0.98),
            eps=1e-10,
            fused=tables[0].is_cuda,
        )
        self.parameters = [*matrices, *tables, *rest]

    def step(self, lr: float) -> Tensor:
        """Clip, update, clear the gradients; returns the gradients' norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.muon.step(lr)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        for p in self.parameters:
            p.grad = None
        return norm
