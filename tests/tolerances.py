"""The one table of tolerances: the bounds that tests compare errors with, and their reasons."""

# Norm of the error over norm of the truth, against the float64 oracle.
OP_FLOAT32 = 2e-6  # one pass over a few hundred tokens, any row of the numerics table
CHUNK_OVER_SEQUENTIAL = 5.0  # chunkwise error over that of the sequential float32 loop
OP_LONG = 1e-5  # extreme gates, long runs of equal tokens
SPLIT = 2e-6  # the same tokens split elsewhere, float32
OUTPUT_ROUNDING = {"float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.9e-3}  # one unit in the last
GRADIENT = 2e-5  # against finite differences of the float64 oracle

# Largest difference over largest magnitude, layers and whole models.
LAYER_FLOAT32 = 1e-5  # one layer against float64
LAYER_HALF = {"float16": 3e-3, "bfloat16": 2e-2}  # one layer, every step rounded to the dtype
GOLDEN = 1e-5  # logits against transformers in float64
STOCK = 1e-5  # logits against stock mlx-lm, float32 on both sides
MODEL_SPLIT = 2e-6  # logits of the same tokens split, padded or batched otherwise, float32
MODEL_LONG = 1e-5  # logits and states after thousands of equal tokens, chunks against steps

# Kernels with 16-bit activations, over the error of rounding the true output to that dtype.
ROUNDED_ONCE = 1.1  # float32 inside, one rounding at the end
HALF_OVER_ROUNDING = 2.0  # float16 K~ and Q~ inside, any row of the table
HALF_STATE = 5e-4  # the state after it: norm of the error over norm of the truth

# Largest error of a quantised weight over the largest weight, by mode and bits. Affine: one step of
# the range. e2m1 is coarsest between 4 and 6, and a power-of-two scale may clip; e4m3 has 3 bits.
QUANTISED = {("affine", bits): 2 / (2**bits - 1) for bits in (2, 3, 4, 5, 6, 8)} | {
    ("mxfp4", 4): 0.26,
    ("nvfp4", 4): 0.2,
    ("mxfp8", 8): 0.07,
}

# Caches of MLA latents that round.
PACKED_SPLIT = 2e-3  # packed latents, split otherwise: a last bit can round an integer elsewhere
INT8_LATENTS = 1e-2  # logits with int8 latents against exact ones
