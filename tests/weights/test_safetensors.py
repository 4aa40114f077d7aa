"""Damaged headers of safetensors files are refused in one line."""

import pytest

from mlx_kda.errors import CheckpointError
from mlx_kda.weights.safetensors import read_header


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a"', b"[]", b"\xff"])
def test_a_damaged_header_is_refused(tmp_path, text):
    (tmp_path / "s").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="damaged safetensors header") as caught:
        read_header(tmp_path / "s")
    assert "\n" not in str(caught.value)
