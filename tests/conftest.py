"""Fixtures that several files share."""

import mlx.core as mx
import pytest

# What tests expect is what MLX computes on the CPU, on a Mac too; test_metal.py asks for the GPU.
mx.set_default_device(mx.cpu)


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory):
    """A small random Kimi Linear checkpoint in the hub's form."""
    from helpers.tiny_checkpoint import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "hf")


@pytest.fixture(scope="session")
def tiny_mlx(tiny_hf):
    """The same checkpoint converted, unquantised."""
    from mlx_kda.convert import convert

    out = tiny_hf.parent / "mlx"
    convert(tiny_hf, out)
    return out


@pytest.fixture(scope="session")
def tiny_model(tiny_mlx):
    """Model and tokenizer of the converted checkpoint."""
    import mlx_kda

    return mlx_kda.load(tiny_mlx)
