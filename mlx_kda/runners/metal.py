"""The "metal" runner: `mx.fast.metal_kernel` itself."""

import mlx.core as mx

from ..errors import UserError


def call_metal(kernel, call):
    """Runs ``kernel`` on Apple's GPU; UserError where MLX has no Metal."""
    if not mx.metal.is_available():
        raise UserError('runner="metal" needs an Apple GPU: use "emulator" on this machine')
    made = kernel._made.get("metal")
    if made is None:
        options = {}
        if kernel.compile_options is not None:
            options["compile_options"] = kernel.compile_options
        made = kernel._made["metal"] = mx.fast.metal_kernel(
            name=kernel.name,
            input_names=kernel.input_names,
            output_names=kernel.output_names,
            source=kernel.source,
            header=kernel.header,
            ensure_row_contiguous=kernel.ensure_row_contiguous,
            atomic_outputs=kernel.atomic_outputs,
            **options,
        )
    return made(**call)
