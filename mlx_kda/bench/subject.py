"""What a benchmark of whole models runs: the model of a folder, or random ones of a shape."""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from .shapes import config, random_model, stock_model


@dataclass(frozen=True)
class Subject:
    """A model as this package and as mlx-lm run it.

    Args:
        folder: a checkpoint's folder; without one a ``shape``, a key of `SHAPES`, with random
            weights, its first ``layers``, a ``vocab`` of its own, ``q_bits`` and ``dtype`` (see
            `random_model`).
        runner: what computes our KDA layers.
        device: "cpu" or "gpu"; MLX's own choice unless given.
    """

    folder: str | Path | None = None
    shape: str | None = None
    layers: int | None = None
    vocab: int | None = None
    q_bits: int | None = None
    dtype: str = "bfloat16"
    runner: str = "auto"
    device: str | None = None

    def check(self, stock: bool = False) -> None:
        """Refuse what cannot be run, by mlx-lm too if ``stock``, and make the device the default.

        Raises:
            UserError: neither folder nor shape, or both; no GPU; too few layers for mlx-lm's class.
        """
        if (self.folder is None) == (self.shape is None):
            raise UserError("name a model's folder or a --shape, one of the two")
        if self.device == "gpu" and not mx.is_available(mx.gpu):
            raise UserError("MLX has no GPU on this machine: leave --device gpu out")
        if stock and self.shape is not None:
            linear = config(self.shape, self.layers)["linear_attn_config"]
            if not linear["full_attn_layers"]:
                raise UserError(
                    "mlx-lm's class needs an MLA layer, the 4th: give --layers 4 or more"
                )
        if self.device is not None:
            mx.set_default_device(mx.gpu if self.device == "gpu" else mx.cpu)

    def ours(self) -> nn.Module:
        """This package's model; UserError for a folder that does not load."""
        from ..models import load_model

        if self.shape is None:
            return load_model(self.folder, self.runner)
        return random_model(self.shape, **self._drawn(), runner=self.runner)

    def stock(self) -> nn.Module:
        """mlx-lm's model of the same folder, or of the same shape with weights of its own."""
        from mlx_lm.utils import load_model

        if self.shape is None:
            return load_model(Path(self.folder))[0]
        return stock_model(self.shape, **self._drawn())

    def _drawn(self) -> dict:
        return {
            "layers": self.layers,
            "vocab": self.vocab,
            "dtype": getattr(mx, self.dtype),
            "q_bits": self.q_bits,
        }
