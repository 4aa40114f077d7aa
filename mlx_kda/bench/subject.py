"""What a benchmark of whole models runs: the model of a folder, or random ones of a shape."""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from ..errors import UserError
from .shapes import SHAPES, config, random_model, stock_model


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
    dtype: str | None = None  # bfloat16
    runner: str = "auto"
    device: str | None = None

    def prepare(self, stock: bool = False) -> None:
        """Make the device MLX's default, and refuse what cannot be run, by mlx-lm too if ``stock``.

        Raises:
            UserError: neither folder nor shape, or both; what belongs to a shape beside a folder;
                no GPU; layers or a dtype that the shape or mlx-lm's class does not have.
        """
        if (self.folder is None) == (self.shape is None):
            raise UserError("name a model's folder or a --shape, one of the two")
        if self.device == "gpu" and not mx.is_available(mx.gpu):
            raise UserError("MLX has no GPU on this machine: leave --device gpu out")
        if self.device is not None:
            mx.set_default_device(mx.gpu if self.device == "gpu" else mx.cpu)
        if self.shape is not None:
            self._check_shape(stock)
            return
        of_shape = {"layers": self.layers, "vocab": self.vocab, "q-bits": self.q_bits}
        for name, value in (of_shape | {"dtype": self.dtype}).items():
            if value is not None:
                raise UserError(f"--{name} belongs to --shape: a folder's model is run as it is")

    def _check_shape(self, stock: bool) -> None:
        most = SHAPES[self.shape]["num_hidden_layers"]
        if self.layers is not None and self.layers > most:
            raise UserError(f"--layers {self.layers}: {self.shape} has {most}")
        if not stock:
            return
        if not config(self.shape, self.layers)["linear_attn_config"]["full_attn_layers"]:
            raise UserError("mlx-lm's class needs an MLA layer, the 4th: give --layers 4 or more")
        if self._drawn()["dtype"] != mx.float32 and not self.q_bits:
            _refuse_on_cpu()

    def ours(self) -> nn.Module:
        """This package's model; UserError for a folder that does not load."""
        from ..models import load_model

        if self.shape is None:
            return load_model(self.folder, self.runner)
        return random_model(self.shape, **self._drawn(), runner=self.runner)

    def stock(self) -> nn.Module:
        """mlx-lm's model of the same folder, or of the same shape with weights of its own."""
        from mlx_lm.utils import load_model

        if self.shape is not None:
            return stock_model(self.shape, **self._drawn())
        model = load_model(Path(self.folder))[0]
        experts = [m for m in model.modules() if isinstance(m, SwitchLinear)]
        if any(m.weight.dtype in (mx.float16, mx.bfloat16) for m in experts):
            _refuse_on_cpu()
        return model

    def _drawn(self) -> dict:
        return {
            "layers": self.layers,
            "vocab": self.vocab,
            "dtype": getattr(mx, self.dtype or "bfloat16"),
            "q_bits": self.q_bits,
        }


def _refuse_on_cpu() -> None:
    if mx.default_device() == mx.cpu:
        raise UserError(
            "mlx-lm's class cannot run 16-bit experts on a CPU: a float32 model (--dtype float32), "
            "or --candidates ours"
        )
