"""One call of a `MetalKernel` in the emulator."""

from dataclasses import replace

import mlx.core as mx

from ...errors import UserError
from ..counters import note_launch
from ..fault import KernelFault
from .launch import MAX_THREADS, Program, Result, to_mlx, to_numpy


def call_emulator(kernel, call, mode) -> Result:
    """Runs ``kernel`` with the arguments ``call`` (those of `mx.fast.metal_kernel`'s call).

    ``mode`` is "checked", "fast" or "count". The outputs of the result are MLX arrays.
    """
    inputs = _inputs(kernel, call["inputs"])
    shapes = [tuple(s) for s in call["output_shapes"]]
    dtypes = list(call["output_dtypes"])
    expect = (
        ("inputs", inputs, kernel.input_names),
        ("output_shapes", shapes, kernel.output_names),
        ("output_dtypes", dtypes, kernel.output_names),
    )
    for what, given, names in expect:
        if len(given) != len(names):
            raise ValueError(
                f"[metal_kernel] Expected `{what}` to have size {len(names)} "
                f"but got size {len(given)}."
            )
    grid, group = tuple(call["grid"]), tuple(call["threadgroup"])
    _check_sizes(kernel.name, grid, group)
    program = _program(kernel, inputs, dtypes, call["template"], mode)
    if call["verbose"]:
        print(f"Generated source code for `{kernel.name}`:\n```\n{program.text.text}\n```")
    ran: list[Result] = []

    @mx.custom_function
    def forward(*arrays):
        memory = [to_numpy(x) for x in arrays]
        ran.append(program.run(memory, shapes, dtypes, grid, group, call["init_value"]))
        return tuple(to_mlx(o, d) for o, d in zip(ran[0].outputs, dtypes, strict=True))

    @forward.vjp
    def no_gradient(*_):  # without this the results' gradient would silently be zero
        raise ValueError(f"[metal_kernel] {kernel.name} has no gradient: wrap it in one of its own")

    outputs = list(forward(*inputs))
    if mode == "count":
        note_launch(kernel.name, ran[0])
    return replace(ran[0], outputs=outputs)


def _inputs(kernel, given):
    inputs = [x if isinstance(x, mx.array) else mx.array(x) for x in given]
    if kernel.ensure_row_contiguous:
        inputs = [mx.contiguous(x) if x.ndim else x for x in inputs]
    try:
        mx.eval(inputs)
    except ValueError as error:
        raise UserError(
            f"the emulator runs a kernel at once; mx.compile and mx.vmap do not allow that: {error}"
        ) from None
    return inputs


def _check_sizes(name, grid, group):
    for what, size in (("grid", grid), ("threadgroup", group)):
        if len(size) != 3 or min(size) < 1:
            raise KernelFault("limits", name, f"{what} {size}: three numbers of at least 1")
    threads = 1
    for g, t in zip(grid, group, strict=True):
        threads *= min(g, t)
    if threads > MAX_THREADS:
        raise KernelFault(
            "limits", name, f"{threads} threads in a threadgroup, the limit is {MAX_THREADS}"
        )


def _program(kernel, inputs, dtypes, template, mode) -> Program:
    kinds = tuple((x.dtype, x.ndim > 0, x.size < 8) for x in inputs)
    key = (mode, kinds, tuple(dtypes), tuple(tuple(t) for t in template or ()))
    program = kernel._made.get(key)
    if program is None:
        text = kernel.generate(inputs, dtypes, template)
        program = kernel._made[key] = Program(kernel.name, text, mode)
    return program
