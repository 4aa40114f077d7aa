"""The peers' Metal kernels, under the name by which the tests know them."""

from mlx_kda.bench.shipped import mlx_header, mlx_lm_gated_delta

__all__ = ["mlx_header", "mlx_lm_gated_delta"]
