"""``metal_kernel``: MLX's custom kernels with a choice of what runs them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from ..errors import UserError
from . import RUNNERS
from .cuda import CudaKernel
from .emulator import EmulatedKernel
from .text import Definition, Launcher, Template

_MODES = {"emulator": "checked", "emulator-fast": "fast", "emulator-count": "count"}


def choose(runner: str = "auto") -> str:
    """The runner that ``runner`` means on this machine, now.

    "auto" is "metal" where MLX has Metal and "cuda" where it has CUDA, if the default device is
    the GPU. The emulator is never chosen silently.

    Raises:
        UserError: an unknown runner, or "auto" without a GPU.
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
        "no GPU for a Metal kernel on this machine: ask for "
        'runner="emulator" (checked, slow) or "emulator-fast"'
    )


@dataclass(eq=False, repr=False)
class MetalKernel(Definition):
    """``mx.fast.metal_kernel`` with a choice of what runs the kernel.

    Args:
        name: of the kernel.
        input_names, output_names: of the buffers, as the source calls them.
        source: the body of the kernel; MLX writes its signature.
        header: Metal text in front of it: helpers, structures, includes.
        ensure_row_contiguous: whether inputs with other strides are copied before a call.
        atomic_outputs: whether the outputs are ``device atomic<T>*``.
        compile_options: for Apple's compiler, as ``{"math_mode": "fast"}``; used by "metal" only.
        runner: "metal" (Apple's GPU); "emulator" (the generated Metal text on the CPU, every
            access checked); "emulator-fast" (the same without checks); "emulator-count" (counts
            operations and bytes, see ``count``); "cuda" (the same body through
            ``mx.fast.cuda_kernel``); "auto" (metal or cuda, chosen at the first call).

    Raises:
        ValueError: no output is named.
        UserError: an unknown runner.
    """

    runner: str = "auto"
    _launchers: dict[str | None, Launcher] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.runner not in RUNNERS:
            choose(self.runner)
        if not self.output_names:
            raise ValueError("[metal_kernel] Must specify at least one output.")

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Template | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
        runner: str | None = None,
    ) -> list[mx.array]:
        """Run the kernel; the arguments are those of MLX's call, and ``runner`` for this call.

        Returns:
            The outputs.

        Raises:
            UserError: a runner that is unknown or that this machine does not have.
            ValueError: arguments that do not fit the kernel.
            KernelFault: a fault that the emulator found.
        """
        launch = self._launchers.get(runner) or self.launcher(runner)
        return launch(
            inputs=inputs,
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            init_value=init_value,
            verbose=verbose,
            stream=stream,
        )

    def launcher(self, runner: str | None = None) -> Launcher:
        """What calls with this ``runner`` run: chosen once, then kept."""
        if runner not in self._launchers:
            self._launchers[runner] = self._make_launcher(choose(runner or self.runner))
        return self._launchers[runner]

    def _make_launcher(self, runner: str) -> Launcher:
        if runner == "cuda":
            return CudaKernel(self)
        if runner != "metal":
            return EmulatedKernel(self, _MODES[runner])
        if not mx.metal.is_available():
            raise UserError('runner="metal" needs an Apple GPU: use "emulator" on this machine')
        options = {} if self.compile_options is None else {"compile_options": self.compile_options}
        made = mx.fast.metal_kernel(
            name=self.name,
            input_names=self.input_names,
            output_names=self.output_names,
            source=self.source,
            header=self.header,
            ensure_row_contiguous=self.ensure_row_contiguous,
            atomic_outputs=self.atomic_outputs,
            **options,
        )
        return cast(Launcher, made)


metal_kernel = MetalKernel
