"""What a checkpoint folder holds, read from its config and headers only."""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UserError
from ..models import map_checkpoint
from ..models.tensor_roles import by_family
from ..weights.source import open_source


@dataclass
class Inspection:
    """Facts of a checkpoint, Hugging Face's or MLX's; `problem` says why it would not convert."""

    source: str
    format: str  # "mlx" or "huggingface"
    model_type: str
    layers: int
    layer_types: dict[str, int]
    context: int
    parameters: int
    tensors: int
    files: int
    nbytes: int
    dtypes: dict[str, int]  # dtype -> bytes
    families: dict[str, dict[str, int]]
    quantization: dict[str, Any] | None
    problem: str | None

    def as_dict(self) -> dict[str, Any]:
        """The facts as JSON takes them."""
        return asdict(self)


def inspect(folder: str | Path) -> Inspection:
    """Describe a checkpoint's folder from its config and headers; no tensor is read.

    Raises CheckpointError or UserError where the folder is no checkpoint or its files are damaged.
    A checkpoint that is whole but cannot be converted is described, with `problem` set.
    """
    if not Path(folder).expanduser().is_dir():
        raise UserError(f"{folder}: no such folder")
    origin = open_source(folder)
    raw, tensors = origin.config, origin.tensors
    dtypes: Counter = Counter()
    for stored in tensors.values():
        dtypes[str(stored.dtype).removeprefix("mlx.core.")] += stored.nbytes
    config, mapping, problem = None, None, None
    stated = raw.get("num_hidden_layers")
    try:
        config, mapping = map_checkpoint(raw, tensors)
    except CheckpointError as error:
        problem = str(error)
    is_mlx = any(name.endswith((".conv.weight", ".scales", ".embed_q.weight")) for name in tensors)
    return Inspection(
        source=str(folder),
        format="mlx" if is_mlx else "huggingface",
        model_type=str(raw.get("model_type")),
        layers=config.num_hidden_layers if config else stated if isinstance(stated, int) else 0,
        layer_types=dict(Counter(config.layer_types)) if config else {},
        context=config.model_max_length if config else 0,
        parameters=mapping.parameters if mapping else sum(t.size for t in tensors.values()),
        tensors=len(tensors),
        files=len({stored.file for stored in tensors.values()}),
        nbytes=origin.nbytes,
        dtypes=dict(dtypes.most_common()),
        families=by_family(tensors.items()),
        quantization=raw.get("quantization"),
        problem=problem,
    )
