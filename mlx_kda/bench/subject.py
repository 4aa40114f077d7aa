"""The model that a benchmark runs: that of a folder, or a random one of a released shape."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
from mlx_lm.models import kimi_linear as mlx_lm_kimi
from mlx_lm.models.switch_layers import SwitchLinear

from ..errors import UserError
from ..layers import MoE
from ..layers.blas_layout import lay_out
from ..models import load_model
from ..models.hybrid import Model
from ..models.kimi_linear import ModelArgs
from .shapes import SHAPES, config


@dataclass(frozen=True)
class Subject:
    """A model as this package and as mlx-lm run it.

    Args:
        folder: a checkpoint's folder; without one a ``shape``, a key of `SHAPES`, with random
            weights: its first ``layers``, with a ``vocab`` of another size, quantised to
            ``q_bits`` in groups of 64 by mlx-lm's rule, in ``dtype`` (bfloat16 unless given; gate
            parameters and the router of ours stay float32).
        runner: what computes our KDA layers.
        device: "cpu" or "gpu"; MLX's own choice unless given.
    """

    folder: str | Path | None = None
    shape: str | None = None
    layers: int | None = None
    vocab: int | None = None
    q_bits: int | None = None
    dtype: str | None = None
    runner: str = "auto"
    device: str | None = None

    def prepare(self, stock: bool = False) -> None:
        """Make the device MLX's default, and check what is asked for.

        Args:
            stock: also check what mlx-lm's class cannot run.

        Raises:
            UserError: neither folder nor shape, or both; an option of a shape beside a folder; no
                GPU; layers or a dtype that the shape or mlx-lm's class does not have.
        """
        if (self.folder is None) == (self.shape is None):
            raise UserError("give either a model's folder or a --shape")
        if self.device == "gpu" and not mx.is_available(mx.gpu):
            raise UserError("MLX has no GPU on this machine: leave --device gpu out")
        if self.device is not None:
            mx.set_default_device(mx.gpu if self.device == "gpu" else mx.cpu)
        if self.shape is not None:
            self._check_shape(self.shape, stock)
            return
        of_shape = {"layers": self.layers, "vocab": self.vocab, "q-bits": self.q_bits}
        for name, value in (of_shape | {"dtype": self.dtype}).items():
            if value is not None:
                raise UserError(f"--{name} belongs to --shape: a folder's model runs as it is")

    def _check_shape(self, shape: str, stock: bool) -> None:
        most = SHAPES[shape]["num_hidden_layers"]
        if self.layers is not None and self.layers > most:
            raise UserError(f"--layers {self.layers}: {shape} has {most}")
        if not stock:
            return
        if not self._config()["linear_attn_config"]["full_attn_layers"]:
            raise UserError("mlx-lm's class needs an MLA layer, the 4th: give --layers 4 or more")
        if self._dtype != mx.float32 and not self.q_bits:
            _refuse_on_cpu()

    def ours(self) -> nn.Module:
        """This package's model; UserError for a folder that does not load."""
        if self.shape is None:
            assert self.folder is not None
            return load_model(self.folder, self.runner)
        model = Model(ModelArgs.from_dict(self._config()))
        model.runner = self.runner
        pack(model, self._dtype, self.q_bits)
        as_loaded(model)
        _draw(model)
        lay_out(model)
        model.merge()
        return model.eval()

    def stock(self) -> nn.Module:
        """mlx-lm's model of the same folder, or of the same shape with weights of its own."""
        if self.shape is not None:
            drawn: nn.Module = mlx_lm_kimi.Model(mlx_lm_kimi.ModelArgs.from_dict(self._config()))
            pack(drawn, self._dtype, self.q_bits)
            _draw(drawn)
            return drawn.eval()
        assert self.folder is not None
        model = mlx_lm.utils.load_model(Path(self.folder))[0]
        experts = [m for m in model.modules() if isinstance(m, SwitchLinear)]
        if any(m.weight.dtype in (mx.float16, mx.bfloat16) for m in experts):
            _refuse_on_cpu()
        return model

    def _config(self) -> dict[str, Any]:
        assert self.shape is not None
        vocab = {} if self.vocab is None else {"vocab_size": self.vocab}
        return config(self.shape, self.layers, **vocab)

    @property
    def _dtype(self) -> mx.Dtype:
        return getattr(mx, self.dtype or "bfloat16")


def _refuse_on_cpu() -> None:
    if mx.default_device() == mx.cpu:
        raise UserError(
            "mlx-lm's class cannot run 16-bit experts on a CPU: use a float32 model "
            "(--dtype float32), or --candidates ours"
        )


def pack(model: nn.Module, dtype: mx.Dtype, q_bits: int | None) -> None:
    """Give every weight a dtype, and quantise by mlx-lm's rule if asked."""
    model.set_dtype(dtype)
    if q_bits:
        nn.quantize(model, 64, q_bits, class_predicate=_quantizable(model))


def as_loaded(model: nn.Module) -> None:
    """Make router and gate parameters float32, as the loader does."""
    for layer in model.layers:
        if layer.is_linear:
            attn = layer.self_attn
            attn.A_log, attn.dt_bias = (w.astype(mx.float32) for w in (attn.A_log, attn.dt_bias))
        if isinstance(layer.mlp, MoE):
            bias = layer.mlp.e_score_correction_bias
            layer.mlp.e_score_correction_bias = bias.astype(mx.float32)
            layer.mlp.gate.apply(
                lambda w: w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w
            )


def _quantizable(model: nn.Module) -> Callable[[str, nn.Module], bool | dict]:
    """The model's own rule of what is quantised, for layers that can be."""
    rule = model.quant_predicate

    def allowed(path: str, module: nn.Module) -> bool | dict:
        return hasattr(module, "to_quantized") and rule(path, module)

    return allowed


def _draw(model: nn.Module) -> None:
    """Evaluate the random weights a layer at a time, for a peak of one layer."""
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
