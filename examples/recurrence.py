"""KDA as an op: the textbook recurrence, the chunkwise form, and a sequence cut in two.

python examples/recurrence.py
"""

import mlx.core as mx

import mlx_kda
from mlx_kda.ops import l2norm

B, T, H, D = 1, 100, 2, 64


def main() -> None:
    """Compute the same outputs three ways and print how far apart they are."""
    mx.random.seed(0)
    q, k, v = (mx.random.normal((B, T, H, D)) for _ in range(3))
    # Keys that resemble each other, as a trained model's do: the hard case for any chunked form.
    k = l2norm(k + 3.0 * k[:, :1])
    q = l2norm(q)
    beta = mx.sigmoid(mx.random.normal((B, T, H)) + 2.0)
    A_log, dt_bias = mx.zeros((H,)), mx.random.uniform(-6.0, 2.0, (H, D))
    g = mlx_kda.softplus_gate(mx.random.normal((B, T, H, D)), A_log, dt_bias)

    o, state = mlx_kda.kda_ref(q, k, v, g, beta)
    print("state:", state.shape, state.dtype)
    print("decay per token, smallest and largest:", mx.exp(g).min().item(), mx.exp(g).max().item())

    chunked, chunked_state = mlx_kda.kda_chunk_ref(q, k, v, g, beta, chunk=16)
    print("chunkwise form, largest difference:", difference(o, chunked))
    print("  of its final state:", difference(state, chunked_state))

    first, middle = mlx_kda.kda(q[:, :37], k[:, :37], v[:, :37], g[:, :37], beta[:, :37])
    rest, _ = mlx_kda.kda(q[:, 37:], k[:, 37:], v[:, 37:], g[:, 37:], beta[:, 37:], state=middle)
    joined = mx.concatenate([first, rest], axis=1)
    print("cut after 37 tokens, largest difference:", difference(o, joined))

    print(mlx_kda.explain(q, k, v, g, beta))


def difference(a: mx.array, b: mx.array) -> float:
    """Largest difference over largest magnitude."""
    return (mx.abs(a - b).max() / mx.abs(a).max()).item()


if __name__ == "__main__":
    main()
