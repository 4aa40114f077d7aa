"""Gradients of the ops paths, against finite differences of the float64 oracle."""

import mlx.core as mx
import numpy as np
import pytest
from tolerances import GRADIENT

from mlx_kda.attention import kda
from mlx_kda.ops import reference64 as oracle

NAMES = ("q", "k", "v", "g", "beta", "state")


@pytest.mark.parametrize("path", ["reference", "step", "chunk"])
@pytest.mark.parametrize("row", ["random", "collinear", "mixed"])
@pytest.mark.parametrize("lengths", [None, [19, 11]])
def test_gradient_of_every_input(path, row, lengths):
    """d loss along a random direction of each input, loss = <o, w> + <S, u>."""
    x = oracle.make(row, T=19, B=2, H=1, Hv=2, Dk=8, Dv=6).with_state()
    rng = np.random.default_rng(3)
    inputs = [*x.arrays(), x.state]
    w, u = rng.standard_normal(x.v.shape), rng.standard_normal(x.state.shape)

    def loss(*args):
        options = {} if lengths is None else {"lengths": mx.array(lengths)}
        o, S = kda(*args[:5], state=args[5], path=path, **options)
        return (o * mx.array(w, dtype=mx.float32)).sum() + (S * mx.array(u, mx.float32)).sum()

    def truth(args):
        o, S = oracle.recurrence(*args[:5], state=args[5], lengths=lengths)
        return (o * w).sum() + (S * u).sum()

    grads = mx.grad(loss, argnums=list(range(6)))(*[mx.array(a) for a in inputs])
    for i, (name, grad) in enumerate(zip(NAMES, grads, strict=True)):
        direction = rng.standard_normal(inputs[i].shape)
        direction /= np.linalg.norm(direction)
        shifted = []
        for h in (1e-6, -1e-6):
            args = [a.astype(np.float64) for a in inputs]
            args[i] = args[i] + h * direction
            shifted.append(truth(args))
        slope = (shifted[0] - shifted[1]) / 2e-6
        got = float((np.array(grad) * direction).sum())
        size = float(np.linalg.norm(np.array(grad)))
        assert np.isfinite(np.array(grad)).all(), name
        assert abs(got - slope) <= GRADIENT * max(size, 1e-3), name
