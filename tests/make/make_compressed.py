"""Make data/compressed_tensors.safetensors with compressed-tensors itself (0.20.1, on PyTorch).

For each layout: the stored parts, and `decompressed`, what that package makes of them. Run by hand
where torch and compressed-tensors are installed; the tests only read the file.
"""

from pathlib import Path

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

OUT = Path(__file__).parents[1] / "data" / "compressed_tensors.safetensors"
GROUPS = {"strategy": "group", "group_size": 32}
ROWS, WIDTH = 24, 64


def main() -> None:
    """Write the file."""
    torch.manual_seed(0)
    kinds = {
        f"int{bits}-g32": (dict(num_bits=bits, type="int", symmetric=True, **GROUPS), WIDTH)
        for bits in (2, 3, 4, 6, 8)
    }
    kinds |= {
        f"int{bits}-g32-asym": (dict(num_bits=bits, type="int", symmetric=False, **GROUPS), WIDTH)
        for bits in (3, 4)
    }
    rows = {"type": "int", "strategy": "channel", "symmetric": True}
    kinds["int8-channel"] = (dict(num_bits=8, **rows), WIDTH)
    kinds["int4-channel-40"] = (dict(num_bits=4, **rows), 40)
    tensors = {}
    for name, (settings, width) in kinds.items():
        tensors |= layout(name, QuantizationArgs(**settings), "pack-quantized", width)
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        symmetric=True,
        scale_dtype=torch.uint8,
        zp_dtype=torch.uint8,
        **GROUPS,
    )
    tensors |= layout("mxfp4", args, "mxfp4-pack-quantized", WIDTH)
    save_file(tensors, OUT)


def layout(name: str, args: QuantizationArgs, kind: str, width: int) -> dict[str, torch.Tensor]:
    """The parts of a random weight in one layout, and the weight that they stand for."""
    weight = (torch.randn(ROWS, width) * 0.1).to(torch.bfloat16)
    groups = weight.reshape(ROWS, -1, args.group_size or width)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    given = {
        "weight": weight,
        "weight_scale": scale.to(torch.bfloat16),
        "weight_zero_point": zero,
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(kind)
    parts = compressor.compress(given, scheme)
    parts |= {"decompressed": compressor.decompress(parts, scheme)["weight"]}
    return {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}


if __name__ == "__main__":
    main()
