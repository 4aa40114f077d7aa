"""A whole conversion laid out from headers: what is read, made, and written, before any data is."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .. import __version__
from ..errors import UserError
from ..format import size
from ..models import map_checkpoint
from ..models.hybrid_config import HybridConfig
from ..models.tensor_roles import CONVOLUTION, tensor_family
from ..weights.safetensors import DTYPE_WORDS, Spec
from ..weights.safetensors_writer import WAITING_BYTES
from ..weights.source import CheckpointSource
from ..weights.source_view import SourceView, view_source
from ..weights.weight_mapping import PIECE_BYTES, WeightMapping
from .quantise import Finished, finish_step, is_cast
from .recipe import Recipe

IDLE_BYTES = 300_000_000  # Python, MLX and what the headers take


@dataclass(frozen=True)
class Wish:
    """What the user asks of a conversion, by the names of `convert`'s arguments."""

    dtype: str | None = None
    q_bits: int | None = None
    q_group_size: int | None = None
    q_mode: str = "affine"
    q_rules: Sequence[str] = ()
    target_bpw: float | None = None
    dequantize: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPE_WORDS:
            raise UserError(
                f"--dtype {self.dtype} is not known: choose float32, float16 or bfloat16"
            )
        self.recipe()

    def recipe(self) -> Recipe | None:
        """A fresh recipe; UserError where it asks for what MLX does not have."""
        return Recipe.make(
            self.q_bits, self.q_group_size, self.q_mode, self.q_rules, self.target_bpw
        )


@dataclass
class Layout:
    """A source, its mapping, and the steps of a conversion under a recipe."""

    source: CheckpointSource
    view: SourceView
    config: HybridConfig
    mapping: WeightMapping
    wish: Wish
    dtype: mx.Dtype
    recipe: Recipe | None
    steps: list[Finished] = field(default_factory=list)

    @property
    def outputs(self) -> dict[str, Spec]:
        """Every tensor that is written, in order."""
        return {name: spec for step in self.steps for name, spec in step.outputs.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that are written."""
        return sum(step.nbytes for step in self.steps)

    @property
    def expected_bytes(self) -> int:
        """Bytes of tensors that will be written, also while a byte budget is not yet spent."""
        if self.recipe and self.recipe.target_bpw is not None and not self.steps:
            return int(self.recipe.target_bpw * self.mapping.parameters / 8)
        return self.nbytes

    @property
    def largest_step(self) -> int:
        """Most bytes that one step holds of what it reads or makes; of a stack, a few rows."""
        tensors = self.view.tensors
        sizes = [1]
        for step in self.mapping.steps:
            reads = [tensors[name].nbytes for name in step.sources]
            if step.pieces:  # with the scales and biases that are kept to the end
                sizes.append(max(PIECE_BYTES, *reads) + step.nbytes // 4)
            else:
                sizes.append(max(sum(reads), step.nbytes))
        return max(sizes)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that may be read ahead, and that may wait to be written."""
        return min(WAITING_BYTES, self.largest_step)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of memory: a step's tensors as read, as made, and as they are written."""
        return 3 * self.largest_step + 2 * self.waiting_bytes + IDLE_BYTES

    def memory_problem(self) -> str | None:
        """Why this machine's memory cannot hold the conversion; None if it can."""
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if 2 * self.peak_bytes <= installed:  # the rule; what looks closer takes seconds to import
            return None
        from ..plan import machine

        total = machine().total
        if self.peak_bytes <= total:
            return None
        return f"converting takes {size(self.peak_bytes)} of memory, this machine has {size(total)}"

    @property
    def dtype_name(self) -> str:
        """The dtype of the plain weights, as config.json says it."""
        return str(self.dtype).removeprefix("mlx.core.")

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The `quantization` entry of config.json, in mlx-lm's form."""
        if self.recipe and self.recipe.packed:
            return self.recipe.as_config()
        return packed_config(self.mapping)

    def finish(self) -> None:
        """Lay out the steps under the recipe, with what a byte budget has chosen."""
        if self.recipe:
            self.recipe.kept.clear()
            self.recipe.packed.clear()
        self.steps = [finish_step(step, self.dtype, self.recipe) for step in self.mapping.steps]
        if self.recipe:
            self.recipe.check_rules()

    def identity(self, shard_bytes: int) -> dict[str, Any]:
        """What must be the same for a conversion to be gone on with."""
        return {
            "source": self.source.identity(),
            "version": __version__,
            "dtype": self.dtype_name,
            "recipe": self.recipe.describe() if self.recipe else {},
            "dequantize": self.wish.dequantize,
            "shard_size": shard_bytes,
        }


def identity_hash(identity: dict[str, Any]) -> str:
    """One text for an identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def lay_out(source: CheckpointSource, wish: Wish) -> Layout:
    """Lay out the conversion of a source; with a byte budget, `finish` is still to be called.

    Raises CheckpointError or UserError: a feature that is not built, a tensor missing, left over
    or of a wrong shape, a layout that is not known, a rule that is for no weight.
    """
    seen = view_source(source, wish.dequantize)
    config, mapping = map_checkpoint(seen.config, seen.tensors)
    recipe = wish.recipe()
    if recipe and mapping.quantized:
        raise UserError(
            f"{source.name} is quantised already: add --dequantize to round its weights a second "
            "time, or convert the unquantised checkpoint"
        )
    dtype = DTYPE_WORDS[wish.dtype] if wish.dtype else common_dtype(mapping)
    result = Layout(source, seen, config, mapping, wish, dtype, recipe)
    if recipe is None or recipe.target_bpw is None:
        result.finish()
    return result


def common_dtype(mapping: WeightMapping) -> mx.Dtype:
    """The dtype that holds most bytes among the tensors whose dtype may change."""
    bytes_of: Counter = Counter()
    for name, spec in mapping.outputs.items():
        if is_cast(name, spec):
            bytes_of[spec.dtype] += spec.nbytes
    return bytes_of.most_common(1)[0][0]


def changed_dtypes(mapping: WeightMapping, dtype: mx.Dtype, all_of_it: bool) -> dict[str, str]:
    """What a cast to `dtype` changes: every tensor if that was asked for, else the odd ones."""
    if all_of_it:
        kinds = {s.dtype for n, s in mapping.outputs.items() if is_cast(n, s)} - {dtype}
        changes = sorted(_change(kind, dtype) for kind in kinds)
        return {"all but gate parameters": ", ".join(changes)} if changes else {}
    return {
        name: _change(spec.dtype, dtype)
        for name, spec in mapping.outputs.items()
        if is_cast(name, spec) and spec.dtype != dtype
    }


def _change(before: mx.Dtype, after: mx.Dtype) -> str:
    return f"{before} -> {after}".replace("mlx.core.", "")


def bits_by_family(layout: Layout) -> dict[str, dict[str, int]]:
    """Family -> how its matrices are stored -> how many of them; {} if nothing is packed."""
    quantization = layout.quantization
    if not quantization:
        return {}
    default = {key: quantization[key] for key in ("group_size", "bits", "mode")}
    counts: dict[str, Counter] = {}
    for name, spec in layout.outputs.items():
        path, _, part = name.rpartition(".")
        if part != "weight" or len(spec.shape) < 2 or CONVOLUTION.search(path):
            continue
        how = layout.dtype_name
        if spec.dtype == mx.uint32:
            form = quantization.get(path, default)
            how = f"{form['bits']} bits {form['mode']}, groups of {form['group_size']}"
        counts.setdefault(tensor_family(name), Counter())[how] += 1
    return {family: dict(sorted(found.items())) for family, found in counts.items()}


def packed_config(mapping: WeightMapping) -> dict[str, Any] | None:
    """The `quantization` entry for weights that came quantised: the commonest form, the others."""
    if not mapping.quantized:
        return None
    forms = [tuple(sorted(form.items())) for form in mapping.quantized.values()]
    default = dict(Counter(forms).most_common(1)[0][0])
    return default | {path: form for path, form in mapping.quantized.items() if form != default}
