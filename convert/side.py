"""One of two models that are compared: which of its weights are read whole, which by rows."""

from collections.abc import Iterator

import mlx.core as mx

from ..weights.source import Reader
from ..weights.weight_mapping import Step
from .layout import Layout
from .rows import Rows
from .weights import plain_weights, unit_of

EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
Weights = dict[str, mx.array]


class Side:
    """One of the two models: its weights, as they are read."""

    def __init__(self, layout: Layout, places: dict[str, list[Step]], hashed: bool):
        self.layout, self.rows = layout, Rows(layout, hashed)
        # by unit, without what is read by rows: experts, embedding and head
        self.steps = {
            unit: [step for step in steps if not _is_large(next(iter(step.outputs)))]
            for unit, steps in places.items()
        }
        made = layout.mapping.outputs
        self.experts = {
            unit: [path for path in expert_paths(unit) if f"{path}.weight" in made]
            for unit in places
        }
        self.reader = Reader(layout.source, self._order(places))
        self.rows.reader = self.reader

    def _order(self, places: dict[str, list[Step]]) -> Iterator[str]:
        """Stored tensors that are read whole, in the order of reading."""
        for unit, steps in self.steps.items():
            yield from self.layout.view.stored(steps)
            if unit in (EMBEDDING, HEAD):
                for start, stop in self.rows.blocks(unit):
                    yield from self.rows.stored(unit, start, stop)
            if paths := self.experts[unit]:
                for start, stop in self.rows.blocks(paths[0], 1):
                    for path in paths:
                        yield from self.rows.stored(path, start, stop)

    def small(self, unit: str) -> Weights:
        """The weights of a unit but those that are read by rows."""
        view, packed = self.layout.view, self.layout.mapping.quantized
        return dict(plain_weights(self.steps[unit], view, packed, self.reader))


def expert_paths(unit: str) -> list[str]:
    """The three stacked weights of a layer's routed experts."""
    return [f"{unit}.mlp.switch_mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")]


def _is_large(name: str) -> bool:
    return unit_of(name) in (EMBEDDING, HEAD) or ".mlp.switch_mlp." in name
