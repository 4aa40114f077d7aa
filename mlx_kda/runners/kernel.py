"""`metal_kernel`: MLX's custom kernels with a choice of what runs them."""

import mlx.core as mx

from ..errors import UserError
from . import text as kernel_text

RUNNERS = ("auto", "metal", "emulator", "emulator-fast", "emulator-count", "cuda")


def choose(runner: str = "auto") -> str:
    """The runner that ``runner`` means on this machine, now.

    "auto" is "metal" where MLX has Metal and "cuda" where it has CUDA, if the default device is
    the GPU; otherwise UserError: the emulator is never chosen silently.
    """
    if runner not in RUNNERS:
        raise UserError(f"unknown runner {runner!r}: choose one of {', '.join(RUNNERS)}")
    if runner != "auto":
        return runner
    if mx.default_device().type == mx.DeviceType.gpu:
        if mx.metal.is_available():
            return "metal"
        if mx.cuda.is_available():
            return "cuda"
    raise UserError(
        "no GPU for a Metal kernel on this machine: use the ops path, or ask for "
        'runner="emulator" (checked, slow) or "emulator-fast"'
    )


class MetalKernel:
    """A kernel with the call of `mx.fast.metal_kernel`; made by `metal_kernel`."""

    def __init__(
        self,
        name,
        input_names,
        output_names,
        source,
        header="",
        ensure_row_contiguous=True,
        atomic_outputs=False,
        compile_options=None,
        runner="auto",
    ):
        if runner not in RUNNERS:
            raise UserError(f"unknown runner {runner!r}: choose one of {', '.join(RUNNERS)}")
        if not output_names:
            raise ValueError("[metal_kernel] Must specify at least one output.")
        self.name = name
        self.input_names = list(input_names)
        self.output_names = list(output_names)
        self.source = source
        self.header = header
        self.ensure_row_contiguous = ensure_row_contiguous
        self.atomic_outputs = atomic_outputs
        self.compile_options = compile_options
        self.runner = runner
        self._made = {}

    def __call__(
        self,
        *,
        inputs,
        output_shapes,
        output_dtypes,
        grid,
        threadgroup,
        template=None,
        init_value=None,
        verbose=False,
        stream=None,
        runner=None,
    ):
        runner = choose(runner or self.runner)
        call = {
            "inputs": inputs,
            "template": template,
            "grid": grid,
            "threadgroup": threadgroup,
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "init_value": init_value,
            "verbose": verbose,
            "stream": stream,
        }
        if runner == "metal":
            from .metal import call_metal

            return call_metal(self, call)
        if runner == "cuda":
            from .cuda import call_cuda

            return call_cuda(self, call)
        from .emulator.call import call_emulator

        mode = {"emulator": "checked", "emulator-fast": "fast", "emulator-count": "count"}[runner]
        return call_emulator(self, call, mode).outputs

    def generate(self, inputs, output_dtypes, template=None) -> kernel_text.KernelText:
        """The Metal text for these inputs, as MLX would print it (without its utilities)."""
        return kernel_text.generate(
            self.name,
            self.input_names,
            self.output_names,
            self.source,
            self.header,
            [as_array(x) for x in inputs],
            output_dtypes,
            template,
            self.atomic_outputs,
        )


def as_array(x):
    """An input as MLX takes it: arrays as they are, Python numbers as 0-d arrays."""
    return x if isinstance(x, mx.array) else mx.array(x)


def metal_kernel(
    name,
    input_names,
    output_names,
    source,
    header="",
    ensure_row_contiguous=True,
    atomic_outputs=False,
    compile_options=None,
    runner="auto",
) -> MetalKernel:
    """`mx.fast.metal_kernel` with a choice of what runs the kernel.

    The arguments, and the call of what is returned, are those of `mx.fast.metal_kernel`.

    Args:
        runner: "metal" (Apple's GPU); "emulator" (the generated text on the CPU, every access
            checked, faults raised as `KernelFault`); "emulator-fast" (the same without checks);
            "emulator-count" (counts operations, see `count`); "cuda" (the same body through
            `mx.fast.cuda_kernel`); "auto" (metal or cuda, else UserError).

    Raises:
        UserError: an unknown runner, or a runner that this machine does not have.
        KernelFault: from the call, a fault that the emulator found.
    """
    return MetalKernel(
        name,
        input_names,
        output_names,
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
        compile_options,
        runner,
    )
