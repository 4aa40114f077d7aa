"""Write a Metal kernel and run it without a Mac: the emulator computes and checks it.

    python examples/metal_kernel.py

The call is that of mx.fast.metal_kernel. On an Apple GPU, leave `runner` out.
"""

import mlx.core as mx
import numpy as np

from mlx_kda.runners import KernelFault, metal_kernel

# One thread per channel walks along the sequence: a running sum that decays.
SOURCE = """
    uint channel = thread_position_in_grid.x;
    float state = 0.0f;
    for (int t = 0; t < T; ++t) {
        uint at = t * C + channel;
        state = state * decay[at] + x[at];
        y[at] = state;
    }
"""


def run(x: mx.array, decay: mx.array, threads: int) -> mx.array:
    """The decaying sum along the first axis of x [T, C], with `threads` threads."""
    kernel = metal_kernel(
        name="decaying_sum",
        input_names=["x", "decay"],
        output_names=["y"],
        source=SOURCE,
        runner="emulator",
    )
    (y,) = kernel(
        inputs=[x, decay],
        template=[("T", x.shape[0]), ("C", x.shape[1])],
        grid=(threads, 1, 1),
        threadgroup=(min(threads, 32), 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[mx.float32],
    )
    return y


def main() -> None:
    """Run it right, then with too many threads."""
    mx.random.seed(0)
    x, decay = mx.random.normal((20, 32)), mx.random.uniform(0.5, 1.0, (20, 32))
    want, state = [], np.zeros(32)
    for row, factor in zip(np.array(x, np.float64), np.array(decay, np.float64), strict=True):
        state = state * factor + row
        want.append(state)
    off = np.abs(np.array(run(x, decay, threads=32)) - np.stack(want)).max()
    print(f"emulated kernel against float64: {off:.1e}")
    try:
        run(x, decay, threads=64)
    except KernelFault as fault:
        print(f"with 64 threads for 32 channels: {fault.kind}")


if __name__ == "__main__":
    main()
