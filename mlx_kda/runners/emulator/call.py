"""A kernel called in the emulator: one compiled program per combination of dtypes and template."""

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import mlx.core as mx

from ...errors import UserError
from ..counters import note_launch
from ..fault import KernelFault
from ..text import CONSTANT_BELOW, Definition, Template, as_array
from .launch import MAX_THREADS, Program, Result, to_mlx, to_numpy


class EmulatedKernel:
    """A kernel called in the emulator. ``mode`` is "checked", "fast" or "count"."""

    def __init__(self, kernel: Definition, mode: str):
        self.kernel, self.mode = kernel, mode
        self.programs: dict[Any, Program] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        template: Template | None,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        init_value: float | None,
        verbose: bool,
        stream: Any,
    ) -> list[mx.array]:
        kernel = self.kernel
        arrays = _evaluated(inputs, kernel.ensure_row_contiguous)
        shapes, dtypes = [tuple(s) for s in output_shapes], list(output_dtypes)
        expect = (
            ("inputs", arrays, kernel.input_names),
            ("output_shapes", shapes, kernel.output_names),
            ("output_dtypes", dtypes, kernel.output_names),
        )
        for what, given, names in expect:
            if len(given) != len(names):
                raise ValueError(
                    f"[metal_kernel] Expected `{what}` to have size {len(names)} "
                    f"but got size {len(given)}."
                )
        _check_sizes(kernel.name, tuple(grid), tuple(threadgroup))
        program = self._program(arrays, dtypes, template)
        if verbose:
            print(f"Generated source code for `{kernel.name}`:\n```\n{program.text.text}\n```")
        ran: list[Result] = []

        @mx.custom_function
        def forward(*given: mx.array) -> tuple[mx.array, ...]:
            memory = [to_numpy(x) for x in given]
            ran.append(program.run(memory, shapes, dtypes, grid, threadgroup, init_value))
            return tuple(to_mlx(o, d) for o, d in zip(ran[0].outputs, dtypes, strict=True))

        @forward.vjp
        def no_gradient(*_: Any) -> None:  # without this the gradient would silently be zero
            raise ValueError(
                f"[metal_kernel] {kernel.name} has no gradient: wrap it in one of its own"
            )

        outputs = cast(tuple[mx.array, ...], forward(*arrays))
        if self.mode == "count":
            note_launch(kernel.name, ran[0].counters, ran[0].shared_bytes)
        return list(outputs)

    def _program(
        self, arrays: list[mx.array], dtypes: list[mx.Dtype], template: Template | None
    ) -> Program:
        kinds = tuple((x.dtype, x.ndim > 0, x.size < CONSTANT_BELOW) for x in arrays)
        key = (kinds, tuple(dtypes), tuple(tuple(t) for t in template or ()))
        program = self.programs.get(key)
        if program is None:
            text = self.kernel.generate(arrays, dtypes, template)
            program = self.programs[key] = Program(self.kernel.name, text, self.mode)
        return program


def _evaluated(given: Sequence[Any], contiguous: bool) -> list[mx.array]:
    arrays = [as_array(x) for x in given]
    if contiguous:
        arrays = [mx.contiguous(x) if x.ndim else x for x in arrays]
    try:
        mx.eval(arrays)
    except ValueError as error:
        raise UserError(
            f"the emulator runs a kernel at once; mx.compile and mx.vmap do not allow that: {error}"
        ) from None
    return arrays


def _check_sizes(name: str, grid: tuple[int, ...], group: tuple[int, ...]) -> None:
    for what, size in (("grid", grid), ("threadgroup", group)):
        if len(size) != 3 or min(size) < 1:
            raise KernelFault("limits", name, f"{what} {size}: three numbers of at least 1")
    threads = prod(min(g, t) for g, t in zip(grid, group, strict=True))
    if threads > MAX_THREADS:
        raise KernelFault(
            "limits", name, f"{threads} threads in a threadgroup, the limit is {MAX_THREADS}"
        )
