"""The "cuda" runner: the same body through ``mx.fast.cuda_kernel``, behind a header.

It is there to run the kernels on a real GPU, with real concurrency and under compute-sanitizer.
Matrix products run on its tensor cores, as accurate as float32 (matrix.h); its speed says nothing
about Metal's.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from ...errors import UserError
from ..text import Definition, Launcher, Template, as_array
from .header import build


class CudaKernel:
    """A kernel called on a CUDA GPU.

    Raises:
        UserError: MLX has no CUDA; from a call, a grid that the threadgroup does not divide.
    """

    def __init__(self, kernel: Definition):
        if not mx.cuda.is_available():
            raise UserError('runner="cuda" needs MLX\'s CUDA build and a CUDA GPU')
        self.kernel = kernel
        self._made: dict[Any, Launcher] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        template: Template | None,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_dtypes: Sequence[mx.Dtype],
        **call: Any,
    ) -> list[mx.array]:
        inputs = [as_array(x) for x in inputs]
        group = tuple(min(t, g) for t, g in zip(threadgroup, grid, strict=True))
        if any(g % t for g, t in zip(grid, group, strict=True)):
            raise UserError(
                f'runner="cuda" needs a grid {tuple(grid)} that the threadgroup {group} divides'
            )
        kinds = tuple((x.dtype, x.ndim > 0) for x in inputs)
        key = (kinds, tuple(output_dtypes), tuple(tuple(t) for t in template or ()))
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = _make(self.kernel, inputs, output_dtypes, template)
        return made(
            inputs=inputs, grid=grid, threadgroup=group, output_dtypes=output_dtypes, **call
        )


def _make(
    kernel: Definition,
    inputs: Sequence[mx.array],
    dtypes: Sequence[mx.Dtype],
    template: Template | None,
) -> Launcher:
    header, source, input_names, output_names = build(kernel, inputs, dtypes, template)
    # MLX keeps compiled modules by name alone, on disk too: the name has to tell them apart.
    digest = hashlib.sha256((header + "\0" + source).encode()).hexdigest()[:16]
    made = mx.fast.cuda_kernel(
        name=f"{kernel.name}_{digest}",
        input_names=input_names,
        output_names=output_names,
        source=source,
        header=header,
        ensure_row_contiguous=kernel.ensure_row_contiguous,
    )
    return cast(Launcher, made)
