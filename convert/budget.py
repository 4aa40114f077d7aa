"""Spending a byte budget: each weight's error at each width is measured, and bytes go to the worst.

The error of a weight is ``|W - Q(W)|^2 / |W|^2``, times how much the model's predictions move for
it (see `sensitivity`). All weights begin at the fewest bits. Then, again and again, the next step
up goes to the weight whose error falls most for each byte it costs, until no step fits the budget.
The gate path takes part: at a given size its bytes often do more elsewhere (docs/quality.md).
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx

from ..errors import UserError
from ..weights.quantization import MODES, Quantization
from ..weights.safetensors import Read, Spec
from ..weights.source import Reader
from ..weights.weight_mapping import Progress, Step
from .journal import Journal
from .layout import Layout
from .quantise import cast, finish_step
from .sensitivity import sensitivity

SLICE = 1 << 24  # elements measured at a time
Point = tuple[int, float, Quantization | None]  # bytes, error, packing


def spend(layout: Layout, journal: Journal, progress: Progress | None) -> None:
    """Choose the packing of every free weight for `target_bpw`, and finish the layout.

    Raises UserError where even the fewest bits pass the budget.
    """
    budget = bytes_to_spend(layout)
    errors = measure(layout, journal, progress)
    specs = _free(layout)
    points = {path: _points(layout, path, specs[path], errors[path]) for path in specs}
    layout.recipe.chosen = allot(points, budget)
    layout.finish()


def bytes_to_spend(layout: Layout) -> int:
    """What `target_bpw` leaves for the free weights, known before any weight is read.

    Raises UserError where they need more even in the fewest bits.
    """
    free, target = _free(layout), layout.recipe.target_bpw
    fixed, parameters = _fixed_bytes(layout, free), layout.mapping.parameters
    least = sum(
        spec.nbytes
        for path, packing in fewest_bits(layout).items()
        for spec in packing.outputs(path, free[path]).values()
    )
    budget = int(target * parameters / 8) - fixed
    if budget < least:
        bits = math.ceil((fixed + least) * 8000 / parameters) / 1000
        raise UserError(
            f"--target-bpw {target:g} is below what the fewest bits take: the least is {bits:.3f}"
        )
    return budget


def _fixed_bytes(layout: Layout, free: dict[str, Spec]) -> int:
    """Bytes of all that no budget changes: norms, convolutions, the router, what rules are for."""
    layout.recipe.chosen = dict.fromkeys(free)
    total = sum(
        spec.nbytes
        for step in layout.mapping.steps
        for spec in finish_step(step, layout.dtype, layout.recipe).outputs.values()
    )
    return total - sum(spec.size * layout.dtype.size for spec in free.values())


def fewest_bits(layout: Layout) -> dict[str, Quantization]:
    """The weights whose bits a budget chooses, each in the fewest."""
    return {path: _candidates(layout, spec)[0] for path, spec in _free(layout).items()}


def _free(layout: Layout) -> dict[str, Spec]:
    """Path -> spec of the weights whose bits may be chosen and that some group size fits."""
    return {
        name.removesuffix(".weight"): Spec(spec.shape, layout.dtype)
        for name, spec in layout.mapping.outputs.items()
        if layout.recipe.is_free(name, spec) and _candidates(layout, spec)
    }


def _candidates(layout: Layout, spec: Spec) -> list[Quantization]:
    """The packings to try for a weight: all affine bits, in the recipe's groups or in smaller."""
    bits, _, groups, _ = MODES["affine"]
    wanted = layout.recipe.default.group_size
    sizes = [size for size in reversed(groups) if size <= wanted and spec.shape[-1] % size == 0]
    tried = [Quantization(b, sizes[0]) for b in bits] if sizes else []
    return [packing for packing in tried if packing.fits(spec.shape[-1])]


def measure(
    layout: Layout, journal: Journal, progress: Progress | None
) -> dict[str, dict[str, float]]:
    """Path -> bits -> error, each weight read once; what the journal holds is not measured anew."""
    free = _free(layout)
    found = {path: e for path, e in journal.measured().items() if path in free}
    steps = [
        step
        for step in layout.mapping.steps
        if any(_path(name) in free and _path(name) not in found for name in step.outputs)
    ]
    total, done = sum(spec.nbytes for spec in free.values()), 0
    done += sum(free[path].nbytes for path in found)
    with Reader(layout.source, layout.view.stored(steps)) as reader:
        read = layout.view.reading(reader)
        for step in steps:
            for name, errors in _measure_step(layout, step, free, read):
                found[name] = errors
                journal.measure(name, errors)
                done += free[name].nbytes
                if progress:
                    progress(done, total, f"measuring {name}")
            mx.clear_cache()
    return found


def _measure_step(
    layout: Layout, step: Step, free: dict[str, Spec], read: Read
) -> Iterator[tuple[str, dict[str, float]]]:
    """(path, bits -> error) of the free weights that a step makes; a stack some rows at a time."""
    if step.pieces:
        (name,) = step.outputs
        made: dict[str, Iterable[mx.array]] = {name: step.pieces(read)}
    else:
        made = {name: [array] for name, array in step.run(read).items()}
    for name, pieces in made.items():
        if (path := _path(name)) in free:
            packings = _candidates(layout, free[path])
            found = errors_of((cast(name, piece, layout.dtype) for piece in pieces), packings)
            yield path, {str(p.bits): error for p, error in zip(packings, found, strict=True)}


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
            total += wide.square().sum().item()
            for place, packing in enumerate(packings):
                how = packing.as_config()
                back = mx.dequantize(*mx.quantize(part, **how), **how).astype(mx.float32)
                wrong[place] += (wide - back).square().sum().item()
    return [one / total if total else 0.0 for one in wrong]


def _points(layout: Layout, path: str, spec: Spec, errors: dict[str, float]) -> list[Point]:
    """What each width of a weight costs and leaves, on the lower convex hull, fewest bytes first.

    The hull is what steps taken one by one can reach; the last point is the weight as it is.
    """
    weight = sensitivity(path, layout.config.tie_word_embeddings)
    points: list[Point] = []
    for packing in _candidates(layout, spec):
        nbytes = sum(s.nbytes for s in packing.outputs(path, spec).values())
        points.append((nbytes, weight * errors[str(packing.bits)], packing))
    points.append((spec.nbytes, 0.0, None))
    hull: list[Point] = []
    for point in sorted(points, key=lambda p: p[:2]):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _gain(a: Point, b: Point) -> float:
    """Error that a byte takes away between two points."""
    return (a[1] - b[1]) / (b[0] - a[0])


def allot(points: dict[str, list[Point]], budget: int) -> dict[str, Quantization | None]:
    """The packing of each weight within a budget of bytes, that holds all in the fewest bits."""
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
