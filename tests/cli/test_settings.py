"""What the program tells MLX by the environment."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("given, kept", [(None, "0"), ("1", "1")])
def test_float32_products_are_float32_unless_the_user_wants_less(given, kept):
    """From the M5 on MLX rounds them to TF32; it reads the environment when it starts."""
    code = (
        "import os, sys\n"
        "from mlx_kda.cli.main import main\n"
        "early = 'mlx.core' in sys.modules\n"
        "main(['info', 'nowhere'])\n"
        "print(early, os.environ['MLX_ENABLE_TF32'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "MLX_ENABLE_TF32"}
    if given is not None:
        environment["MLX_ENABLE_TF32"] = given
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", kept]
