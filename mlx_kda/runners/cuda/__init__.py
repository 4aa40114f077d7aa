"""The "cuda" runner: the same body through `mx.fast.cuda_kernel`, behind a header.

It is there to run the kernels on a real GPU, with real concurrency and under compute-sanitizer.
Matrix products run on its tensor cores, as accurate as float32 (matrix.h); its speed says nothing
about Metal's.
"""

import hashlib

import mlx.core as mx

from ...errors import UserError
from .header import build


def call_cuda(kernel, call):
    """Runs ``kernel`` on a CUDA GPU; UserError where MLX has none or the grid does not fit."""
    if not mx.cuda.is_available():
        raise UserError('runner="cuda" needs MLX\'s CUDA build and a CUDA GPU')
    call = dict(call)
    inputs = [x if isinstance(x, mx.array) else mx.array(x) for x in call["inputs"]]
    call["inputs"] = inputs
    grid, group = call["grid"], call["threadgroup"]
    group = tuple(min(t, g) for t, g in zip(group, grid, strict=True))
    if any(g % t for g, t in zip(grid, group, strict=True)):
        raise UserError(
            f'runner="cuda" needs a grid {tuple(grid)} that the threadgroup {group} divides'
        )
    call["threadgroup"] = group
    template = call.pop("template")
    dtypes = list(call["output_dtypes"])
    kinds = tuple((x.dtype, x.ndim > 0) for x in inputs)
    key = ("cuda", kinds, tuple(dtypes), tuple(tuple(t) for t in template or ()))
    made = kernel._made.get(key)
    if made is None:
        made = kernel._made[key] = _make(kernel, inputs, dtypes, template)
    return made(**call)


def _make(kernel, inputs, dtypes, template):
    header, source, input_names, output_names = build(kernel, inputs, dtypes, template)
    # MLX keeps compiled modules by name alone, on disk too: the name has to tell them apart.
    digest = hashlib.sha256((header + "\0" + source).encode()).hexdigest()[:16]
    return mx.fast.cuda_kernel(
        name=f"{kernel.name}_{digest}",
        input_names=input_names,
        output_names=output_names,
        source=source,
        header=header,
        ensure_row_contiguous=kernel.ensure_row_contiguous,
    )
