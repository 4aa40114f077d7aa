"""Runs the body of a Metal kernel, with defaults for names and sizes."""

import mlx.core as mx

from mlx_kda.runners import metal_kernel


def kernel(source, inputs="a", outputs="out", runner="emulator", **definition):
    """A kernel; the names of its inputs and outputs are separated by spaces."""
    return metal_kernel(
        name="tested",
        input_names=inputs.split(),
        output_names=outputs.split(),
        source=source,
        runner=runner,
        **definition,
    )


def arguments(inputs, shapes=None, dtypes=mx.float32, grid=None, group=None, **call):
    """The arguments of a call.

    Args:
        inputs: arrays or numbers.
        shapes: of the outputs; one of the first input's shape unless given.
        dtypes: of the outputs, or of all of them.
        grid: threads, or a triple; one per element of the first output unless given.
        group: threads of a threadgroup, or a triple; at most 64 unless given.
    """
    shapes = [inputs[0].shape] if shapes is None else shapes
    if grid is None:
        grid = mx.zeros(shapes[0]).size
    grid = (grid, 1, 1) if isinstance(grid, int) else grid
    if group is None:
        group = min(grid[0], 64)
    return {
        "inputs": inputs,
        "output_shapes": shapes,
        "output_dtypes": dtypes if isinstance(dtypes, list) else [dtypes] * len(shapes),
        "grid": grid,
        "threadgroup": (group, 1, 1) if isinstance(group, int) else group,
        **call,
    }


def launch(source, inputs, *, names="a b c", outputs="out", runner="emulator", **options):
    """The outputs of a kernel, or its only output.

    Its inputs are called a, b, c unless ``names`` says otherwise; ``options`` are those of
    ``arguments`` and of the definition.
    """
    definition = {
        name: options.pop(name)
        for name in ("header", "ensure_row_contiguous", "atomic_outputs")
        if name in options
    }
    names = " ".join(names.split()[: len(inputs)])
    got = kernel(source, names, outputs, runner, **definition)(**arguments(inputs, **options))
    return got[0] if len(got) == 1 else got
