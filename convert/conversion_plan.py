"""A whole conversion planned from headers: what is read, made and written, before any data is."""

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .. import __version__
from ..errors import UserError
from ..format import size
from ..memory_plan import machine
from ..models import map_checkpoint
from ..models.hybrid_config import HybridConfig
from ..models.tensor_roles import CONVOLUTION, tensor_family
from ..weights.quantization import config_entry
from ..weights.safetensors import DTYPE_WORDS, Spec
from ..weights.safetensors_writer import WAITING_BYTES
from ..weights.source import CheckpointSource
from ..weights.source_view import SourceView, view_source
from ..weights.weight_mapping import PIECE_BYTES, WeightMapping
from .quantise import OutputStep, is_cast, output_step
from .recipe import ConvertOptions, Recipe

IDLE_BYTES = 300_000_000  # Python, MLX and the headers
SHARD_BYTES = 5_000_000_000


@dataclass
class ConversionPlan:
    """A source, its mapping, and the steps of a conversion under a recipe."""

    source: CheckpointSource
    view: SourceView
    config: HybridConfig
    mapping: WeightMapping
    options: ConvertOptions
    dtype: mx.Dtype
    recipe: Recipe | None
    steps: list[OutputStep] = field(default_factory=list)

    @property
    def has_budget(self) -> bool:
        """Whether a byte budget chooses the bits."""
        return self.recipe is not None and self.recipe.target_bpw is not None

    @property
    def outputs(self) -> dict[str, Spec]:
        """Every tensor that is written, in order."""
        return outputs_of(self.steps)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are written."""
        return sum(step.nbytes for step in self.steps)

    @property
    def expected_bytes(self) -> int:
        """Bytes of the tensors that will be written, also before a byte budget is spent."""
        if self.options.target_bpw is not None and not self.steps:
            return int(self.options.target_bpw * self.mapping.parameters / 8)
        return self.nbytes

    @property
    def largest_step(self) -> int:
        """The most bytes that one step reads or makes at a time."""
        tensors = self.view.tensors
        sizes = [1]
        for step in self.mapping.steps:
            reads = [tensors[name].nbytes for name in step.sources]
            if step.pieces:  # some rows, and the scales and biases of all rows
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
        if 2 * self.peak_bytes <= installed:
            return None
        total = machine().total
        if self.peak_bytes <= total:
            return None
        return f"converting takes {size(self.peak_bytes)} of memory, this machine has {size(total)}"

    @property
    def dtype_name(self) -> str:
        """The dtype of the unquantised weights, as config.json names it."""
        return str(self.dtype).removeprefix("mlx.core.")

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The ``quantization`` entry of config.json, in mlx-lm's form."""
        if self.recipe and self.recipe.packed:
            return self.recipe.as_config()
        if not self.mapping.quantized:
            return None
        # Weights quantised in the source: the most frequent settings, and the weights that differ.
        return config_entry(self.mapping.quantized)

    def apply_recipe(self) -> None:
        """Plan the output steps under the recipe, with what a byte budget has chosen."""
        if self.recipe:
            self.recipe.kept.clear()
            self.recipe.packed.clear()
        self.steps = [output_step(step, self.dtype, self.recipe) for step in self.mapping.steps]
        if self.recipe:
            self.recipe.check_rules()

    def shards(self, shard_bytes: int) -> dict[str, list[OutputStep]]:
        """File name -> its steps, in order, each file within the size; no step is split."""
        shards: list[list[OutputStep]] = [[]]
        nbytes = 0
        for step in self.steps:
            if nbytes + step.nbytes > shard_bytes and nbytes:
                shards.append([])
                nbytes = 0
            shards[-1].append(step)
            nbytes += step.nbytes
        if len(shards) == 1:
            return {"model.safetensors": shards[0]}
        return {
            f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
            for number, shard in enumerate(shards, start=1)
        }

    def identity(self, shard_bytes: int) -> dict[str, Any]:
        """What must be the same for a conversion to be resumed."""
        return {
            "source": self.source.identity(),
            "version": __version__,
            "dtype": self.dtype_name,
            "recipe": self.recipe.describe() if self.recipe else {},
            "dequantize": self.options.dequantize,
            "shard_size": shard_bytes,
        }

    def casts(self) -> dict[str, str]:
        """Tensor -> dtypes before and after its cast; one entry for all if --dtype was given."""
        changes = {
            name: f"{spec.dtype} -> {self.dtype}".replace("mlx.core.", "")
            for name, spec in self.mapping.outputs.items()
            if is_cast(name, spec) and spec.dtype != self.dtype
        }
        if self.options.dtype is None or not changes:
            return changes
        return {"all but gate parameters": ", ".join(sorted(set(changes.values())))}

    def bits_by_family(self) -> dict[str, dict[str, int]]:
        """Family -> how its matrices are stored -> how many; {} if nothing is quantised."""
        quantization = self.quantization
        if not quantization:
            return {}
        default = {key: quantization[key] for key in ("group_size", "bits", "mode")}
        counts: dict[str, Counter[str]] = {}
        for name, spec in self.outputs.items():
            path, _, part = name.rpartition(".")
            if part != "weight" or len(spec.shape) < 2 or CONVOLUTION.search(path):
                continue
            how = self.dtype_name
            if spec.dtype == mx.uint32:
                packing = quantization.get(path, default)
                how = f"{packing['bits']} bits {packing['mode']}, groups of {packing['group_size']}"
            counts.setdefault(tensor_family(name), Counter())[how] += 1
        return {family: dict(sorted(found.items())) for family, found in counts.items()}


def plan_conversion(source: CheckpointSource, options: ConvertOptions) -> ConversionPlan:
    """Plan the conversion of a source; with a byte budget, ``apply_recipe`` is still to be called.

    Raises CheckpointError or UserError: a feature or layout that is not supported, a tensor that
    is missing, left over or of a wrong shape, a rule that applies to no weight.
    """
    seen = view_source(source, options.dequantize)
    config, mapping = map_checkpoint(seen.config, seen.tensors)
    recipe = options.recipe()
    if recipe and mapping.quantized:
        raise UserError(
            f"{source.name} is quantised already: add --dequantize to round its weights a second "
            "time, or convert the unquantised checkpoint"
        )
    dtype = DTYPE_WORDS[options.dtype] if options.dtype else _common_dtype(mapping)
    plan = ConversionPlan(source, seen, config, mapping, options, dtype, recipe)
    if not plan.has_budget:
        plan.apply_recipe()
    return plan


def outputs_of(steps: list[OutputStep]) -> dict[str, Spec]:
    """Every tensor that some steps make, in order."""
    return {name: spec for step in steps for name, spec in step.outputs.items()}


def identity_hash(identity: dict[str, Any]) -> str:
    """A hash of a conversion's identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _common_dtype(mapping: WeightMapping) -> mx.Dtype:
    """The dtype of most bytes among the tensors that are cast."""
    bytes_of: Counter[mx.Dtype] = Counter()
    for name, spec in mapping.outputs.items():
        if is_cast(name, spec):
            bytes_of[spec.dtype] += spec.nbytes
    return bytes_of.most_common(1)[0][0]
