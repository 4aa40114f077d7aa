"""The routed experts of a layer, computed one by one, for several models at once."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np


class Routed(nn.Module):
    """Stands where a layer has its experts, and computes them one by one afterwards."""

    def __init__(self, config: object):
        super().__init__()
        self._width = config.hidden_size
        self._inputs: list[mx.array] = []  # of each model [N, hidden]
        self._weights: list[mx.array] = []  # [N, k]
        self._chosen: list[np.ndarray] = []  # [N, k]
        self._outputs: list[mx.array] = []  # [N, hidden]
        self._seen: mx.array | None = None

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """Nothing for now: x [..., hidden], chosen [..., k] -> zeros [..., k, hidden]."""
        self._seen = x
        return mx.zeros((*chosen.shape, self._width))

    def keep(self, moe: nn.Module) -> None:
        """Note what the layer's experts were asked for."""
        x = self._seen
        chosen, weights = moe.select(x)
        rows = x.reshape(-1, x.shape[-1])
        mx.eval(rows, chosen, weights)
        self._inputs.append(rows)
        self._weights.append(weights.reshape(rows.shape[0], -1))
        self._chosen.append(np.array(chosen).reshape(rows.shape[0], -1))
        self._outputs.append(mx.zeros(x.shape).reshape(rows.shape))
        self._shape = x.shape

    def add(self, expert: int, models: list[list[mx.array]]) -> None:
        """Add what one expert, (gate, up, down) of each model, makes of the tokens sent to it."""
        for model, matrices in enumerate(models):
            at, place = np.nonzero(self._chosen[model] == expert)
            if not at.size:
                continue
            gate, up, down = (w.astype(mx.float32).T for w in matrices)
            rows = mx.array(at)
            x, weights = self._inputs[model][rows], self._weights[model][rows, mx.array(place)]
            y = (nn.silu(x @ gate) * (x @ up)) @ down
            self._outputs[model][rows] += weights[:, None] * y
        mx.eval(self._outputs)
        mx.clear_cache()

    def outputs(self) -> list[mx.array]:
        """What the experts add to the hidden states of each model."""
        return [y.reshape(self._shape) for y in self._outputs]
