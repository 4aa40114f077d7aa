"""The recipes that quality.py evaluates, by their names.

source                     as it is
q4, mxfp4, ...             the default recipe at some bits
q4+gates, q4+gates8        the gate path quantised too, in the same bits or in 8
q4=size, q4+gates=size     bits chosen weight by weight, in as many bytes as q4 takes
q4@experts, q4@KDA-gates   one family of weights alone
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_kda.convert import convert
from mlx_kda.convert.bit_budget import errors_of
from mlx_kda.convert.conversion_plan import plan_conversion
from mlx_kda.convert.recipe import ConvertOptions
from mlx_kda.errors import UserError
from mlx_kda.models.tensor_roles import CONVOLUTION, TENSOR_FAMILIES, tensor_family
from mlx_kda.weights.quantization import Quantization
from mlx_kda.weights.source import open_source

AFFINE_BITS = (8, 6, 5, 4, 3, 2)
FAMILIES = (
    "embedding", "head", "dense MLP", "attention projections", "experts", "router", "MLA latents",
    "shared experts", "KDA gates",
)  # fmt: skip
GATE_PATH = "gate path"  # the reason that the default recipe gives for what it keeps
_BASES = {f"q{bits}": {"q_bits": bits} for bits in AFFINE_BITS} | {
    mode: {"q_bits": bits, "q_mode": mode} for mode, bits in (("mxfp4", 4), ("nvfp4", 4))
}
_NAME = re.compile(r"(?P<base>\w+?)(?P<gates>\+gates8?)?(?P<size>=size)?(@(?P<family>[\w-]+))?")


@dataclass(frozen=True)
class Recipe:
    """A recipe by its name.

    base: "source", or the default recipe at some bits. gates: "" keeps the gate path, "+gates"
    packs it in the same bits, "+gates8" in 8. same_size: bits chosen weight by weight, in as many
    bytes as the base's default recipe takes. family: of the tensors that alone are quantised.
    """

    base: str
    gates: str = ""
    same_size: bool = False
    family: str | None = None

    @classmethod
    def parse(cls, name: str) -> "Recipe":
        """Raises UserError for a name that is none."""
        found = _NAME.fullmatch(name)
        if found is not None:
            family = found["family"] and found["family"].replace("-", " ")
            self = cls(found["base"], found["gates"] or "", bool(found["size"]), family)
            if self._exists():
                return self
        raise UserError(
            f"no recipe {name!r}: there are source, {', '.join(_BASES)}, each of them with +gates "
            "or +gates8 (the gate path quantised too, in 8 bits), q4=size, q4+gates=size (the same "
            "bytes, spent where the measured error is largest), and q4@FAMILY (and so on: one of "
            f"{', '.join(f.replace(' ', '-') for f in FAMILIES)} alone)"
        )

    def _exists(self) -> bool:
        affine = self.base.startswith("q")
        if self.base not in _BASES:
            return self == Recipe("source")
        if self.family is not None:
            known = self.family in TENSOR_FAMILIES
            return known and affine and not self.gates and not self.same_size
        return affine or not (self.same_size or self.gates == "+gates8")

    def __str__(self) -> str:
        family = "" if self.family is None else "@" + self.family.replace(" ", "-")
        return self.base + self.gates + ("=size" if self.same_size else "") + family

    @property
    def without_gates(self) -> "Recipe":
        """The same recipe with the gate path kept."""
        return replace(self, gates="")

    def words(self) -> str:
        """What a reader of a table needs to know of it."""
        if self.base == "source":
            return "source, not quantised"
        bits = f"{self.base[1:]} bits" if self.base[0] == "q" else self.base
        if self.family is not None:
            return f"{bits}, {self.family} alone"
        if self.same_size:
            bits = f"mixed bits in the size of {bits}"
        return (
            bits + {"": "", "+gates": ", the gate path too", "+gates8": ", gates in 8"}[self.gates]
        )

    def options(self, source: str | Path, scratch: Path) -> dict[str, Any]:
        """The arguments of ``convert``; a default conversion tells paths and size for the rest."""
        options = dict(_BASES.get(self.base, {}))
        if self.family is not None:
            paths = family_paths(source, self.family)
            return {"q_rules": [f"{path}={options['q_bits']},64" for path in paths]}
        if not (self.gates or self.same_size):
            return options
        default = convert(source, scratch / f"{self.base}-default", **options, overwrite=True)
        if self.gates:
            q = default.quantization
            how = (
                "8,64" if self.gates == "+gates8" else f"{q['bits']},{q['group_size']},{q['mode']}"
            )
            gates = [path for path, why in default.kept.items() if why == GATE_PATH]
            options["q_rules"] = [f"{path}={how}" for path in gates]
        if self.same_size:
            del options["q_bits"]
            options["target_bpw"] = default.bits_per_weight
        return options

    def relative_error(self, source: str | Path) -> float:
        """Sum over a family's weights of ``|W - Q(W)|^2 / |W|^2``."""
        packing = Quantization(_BASES[self.base]["q_bits"], 64)
        plan, total = plan_conversion(open_source(source), ConvertOptions()), 0.0
        names = {f"{path}.weight" for path in family_paths(source, self.family)}
        for step in plan.mapping.steps:
            if names & step.outputs.keys():
                made = step.run(plan.view.reading(plan.source.read))
                total += sum(errors_of([made[n]], [packing])[0] for n in names & made.keys())
        return total


def family_paths(source: str | Path, family: str) -> list[str]:
    """The weights of a family that 64 columns a group fit. Raises UserError if there are none."""
    packing, paths = Quantization(8, 64), []
    for name, spec in plan_conversion(open_source(source), ConvertOptions()).outputs.items():
        path, _, part = name.rpartition(".")
        matrix = part == "weight" and len(spec.shape) > 1 and not CONVOLUTION.search(path)
        if matrix and tensor_family(name) == family and packing.fits(spec.shape[-1]):
            paths.append(path)
    if not paths:
        raise UserError(f"{source} has no {family} that can be quantised")
    return paths
