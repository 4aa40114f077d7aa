"""Spending a byte budget: each weight's error at each width is measured, and bytes go to the worst.

All weights start at the fewest bits. Then the next step up goes, again and again, to the weight
whose error falls most per byte, until no step fits the budget. The gate path takes part: at a given
size its bytes often do more elsewhere (docs/quality.md).

The error of a weight is ``|W - Q(W)|^2 / |W|^2`` times its sensitivity: how much the model's
predictions move. Quantising one weight moves them by a divergence (KL, nats per token) about
proportional to its relative error, and the divergences of several weights about add up. The
proportion differs by a factor of a hundred. It was measured on the trained checkpoint in
``examples``, weight by weight at 3 bits, and is rounded here by the weight's role (docs/quality.md
has it by family at 3 and 4 bits, and its effect on two models):

- The embedding's error is in everything the layers read, the head's in everything they output.
- The first layer works on the embedding alone: three times the others.
- What a block writes (values, outputs) counts more than what it compares with (queries, keys), and
  routed experts more than the shared one.
- The gate path counts little: its maps go through a sigmoid or an exponential.

Only the proportions between weights matter. They do not depend on data, so that they are known
while a checkpoint streams by; another model's will differ.
"""

import heapq
import math
import re
from collections.abc import Iterable, Sequence

import mlx.core as mx

from ..errors import UserError
from ..weights.quantization import MODES, Quantization
from ..weights.safetensors import Spec
from ..weights.source import Reader
from ..weights.weight_mapping import Progress
from .conversion_plan import ConversionPlan
from .quantise import cast, made_pieces, output_step
from .resume import ResumeState

SLICE = 1 << 24  # elements measured at a time
# Path -> divergence for a relative error of 1; the first that matches counts.
SENSITIVITIES = {
    r"^model\.embed_tokens$": 4.0,
    r"^lm_head$": 2.0,
    r"\.mlp\.shared_experts\.": 0.08,
    r"\.mlp\.switch_mlp\.": 0.4,
    r"\.mlp\.": 0.5,
    r"\.self_attn\.[vo]_proj$": 0.6,
    r"\.self_attn\.[qk]_proj$": 0.2,
    r"\.self_attn\.(b|f_a|f_b|g_a|g_b)_proj$": 0.08,
    r"\.self_attn\.": 0.2,  # latents of MLA
}
FIRST_LAYER, FIRST_FACTOR = "model.layers.0.", 3.0
Point = tuple[int, float, Quantization | None]  # bytes, error, packing


class BitBudget:
    """The weights whose bits may be chosen, and the bytes that ``target_bpw`` leaves for them.

    Both are known before any weight is read. Raises UserError where the weights need more even in
    the fewest bits.
    """

    def __init__(self, plan: ConversionPlan):
        self.plan = plan
        recipe, target = plan.recipe, plan.options.target_bpw
        assert recipe is not None and recipe.default is not None and target is not None
        self.recipe = recipe
        self.specs: dict[str, Spec] = {}  # path -> spec in the model's dtype
        self.packings: dict[str, list[Quantization]] = {}  # path -> candidates, fewest bits first
        for name, spec in plan.mapping.outputs.items():
            packings = _candidates(spec.shape[-1], recipe.default.group_size) if spec.shape else []
            if packings and recipe.is_free(name, spec):
                self.specs[_path(name)] = Spec(spec.shape, plan.dtype)
                self.packings[_path(name)] = packings

        parameters, fixed = plan.mapping.parameters, self._fixed_bytes()
        least = sum(self.packed_bytes(path, found[0]) for path, found in self.packings.items())
        self.nbytes = int(target * parameters / 8) - fixed
        if self.nbytes < least:
            bits = math.ceil((fixed + least) * 8000 / parameters) / 1000
            raise UserError(f"--target-bpw {target:g} is too low: the least possible is {bits:.3f}")

    def _fixed_bytes(self) -> int:
        """Bytes that no budget changes: norms, convolutions, the router, weights with a rule."""
        self.recipe.chosen = dict.fromkeys(self.specs)
        steps = (output_step(s, self.plan.dtype, self.recipe) for s in self.plan.mapping.steps)
        return sum(step.nbytes for step in steps) - sum(s.nbytes for s in self.specs.values())

    def packed_bytes(self, path: str, packing: Quantization) -> int:
        """Bytes of a weight under a packing."""
        return sum(spec.nbytes for spec in packing.outputs(path, self.specs[path]).values())

    def apply(self, chosen: dict[str, Quantization | None]) -> None:
        """Plan the output steps with the packings that were chosen; None leaves a weight as is."""
        self.recipe.chosen = chosen
        self.plan.apply_recipe()

    def apply_fewest(self) -> None:
        """Plan the output steps with every weight in the fewest bits."""
        self.apply({path: packings[0] for path, packings in self.packings.items()})


def spend(plan: ConversionPlan, state: ResumeState, progress: Progress | None) -> None:
    """Choose the packing of every free weight for ``target_bpw``, and plan the output steps.

    Raises UserError where even the fewest bits exceed the budget.
    """
    budget = BitBudget(plan)
    errors = measure(budget, state, progress)
    points = {path: _points(budget, path, errors[path]) for path in budget.specs}
    budget.apply(allot(points, budget.nbytes))


def _candidates(width: int, group_size: int) -> list[Quantization]:
    """The packings to try for rows of a width: all affine bits, in groups of at most this size."""
    bits, _, groups, _ = MODES["affine"]
    sizes = [size for size in reversed(groups) if size <= group_size and width % size == 0]
    tried = [Quantization(b, sizes[0]) for b in bits] if sizes else []
    return [packing for packing in tried if packing.fits(width)]


def measure(
    budget: BitBudget, state: ResumeState, progress: Progress | None
) -> dict[str, dict[str, float]]:
    """Path -> bits -> error, each weight read once; errors that the state holds are reused."""
    plan, specs = budget.plan, budget.specs
    found = {path: errors for path, errors in state.measured().items() if path in specs}
    left = specs.keys() - found.keys()
    steps = [s for s in plan.mapping.steps if any(_path(name) in left for name in s.outputs)]
    total = sum(spec.nbytes for spec in specs.values())
    done = sum(specs[path].nbytes for path in found)
    with Reader(plan.source, plan.view.stored(steps)) as reader:
        read = plan.view.reading(reader)
        for step in steps:
            for name, pieces in made_pieces(step, read):
                path = _path(name)
                if path not in specs:
                    continue
                packings = budget.packings[path]
                errors = errors_of((cast(name, piece, plan.dtype) for piece in pieces), packings)
                found[path] = {str(p.bits): e for p, e in zip(packings, errors, strict=True)}
                state.record_errors(path, found[path])
                done += specs[path].nbytes
                if progress:
                    progress(done, total, f"measuring {path}")
            mx.clear_cache()
    return found


def _path(name: str) -> str:
    return name.removesuffix(".weight")


def errors_of(pieces: Iterable[mx.array], packings: Sequence[Quantization]) -> list[float]:
    """``|W - Q(W)|^2 / |W|^2`` of a weight under each packing, a few rows at a time."""
    wrong, total = [0.0] * len(packings), 0.0
    for piece in pieces:
        flat = piece.reshape(-1, piece.shape[-1])
        rows = max(1, SLICE // flat.shape[1])
        for start in range(0, flat.shape[0], rows):
            part = flat[start : start + rows]
            wide = part.astype(mx.float32)
            total += float(wide.square().sum())
            for place, packing in enumerate(packings):
                how = packing.as_config()
                back = mx.dequantize(*mx.quantize(part, **how), **how).astype(mx.float32)
                wrong[place] += float((wide - back).square().sum())
    return [one / total if total else 0.0 for one in wrong]


def _points(budget: BitBudget, path: str, errors: dict[str, float]) -> list[Point]:
    """The bytes and the error of each width of a weight, fewest bytes first.

    Only those on the lower convex hull, which steps taken one by one can reach. The last point is
    the weight unquantised.
    """
    weight = sensitivity(path, budget.plan.config.tie_word_embeddings)
    points: list[Point] = [
        (budget.packed_bytes(path, packing), weight * errors[str(packing.bits)], packing)
        for packing in budget.packings[path]
    ]
    points.append((budget.specs[path].nbytes, 0.0, None))
    hull: list[Point] = []
    for point in sorted(points, key=lambda p: p[:2]):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _gain(a: Point, b: Point) -> float:
    """The error that each byte removes between two points."""
    return (a[1] - b[1]) / (b[0] - a[0])


def allot(points: dict[str, list[Point]], budget: int) -> dict[str, Quantization | None]:
    """The packing of each weight within a budget of bytes, enough for all in the fewest bits."""
    at = dict.fromkeys(points, 0)
    budget -= sum(hull[0][0] for hull in points.values())
    steps = [(-_gain(h[0], h[1]), path) for path, h in points.items() if len(h) > 1]
    heapq.heapify(steps)
    while steps:
        _, path = heapq.heappop(steps)
        hull, place = points[path], at[path]
        cost = hull[place + 1][0] - hull[place][0]
        if cost > budget:
            continue  # a smaller weight may still have a step that fits
        budget -= cost
        at[path] = place + 1
        if place + 2 < len(hull):
            heapq.heappush(steps, (-_gain(hull[place + 1], hull[place + 2]), path))
    return {path: points[path][place][2] for path, place in at.items()}


def sensitivity(path: str, tied: bool = False) -> float:
    """Divergence for a relative error of 1 in a weight; a ``tied`` embedding is the head too."""
    weight = next((value for role, value in SENSITIVITIES.items() if re.search(role, path)), 0.2)
    if tied and path == "model.embed_tokens":
        weight += SENSITIVITIES["^lm_head$"]
    return weight * (FIRST_FACTOR if path.startswith(FIRST_LAYER) else 1.0)
