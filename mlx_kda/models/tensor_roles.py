"""Weights that are quantised otherwise than the rest, by their path."""

import re

from ..weights.quantization import Quantization

GATE_PATH = re.compile(r"\.self_attn\.(b_proj|f_a_proj|f_b_proj|g_a_proj|g_b_proj)$")
ROUTER = re.compile(r"\.mlp\.gate$")
CONVOLUTION = re.compile(r"_conv\.conv$")
ROUTER_QUANTIZATION = Quantization(8, 64)
