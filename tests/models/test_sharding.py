"""Two processes share the heads and the widths, and answer as one does."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.paths import TESTS
from helpers.paused import LIMIT
from helpers.tiny import difference, tiny_model
from tolerances import MODEL_SPLIT

from mlx_kda.errors import UserError
from mlx_kda.models.sharding import shard

SCRIPT = TESTS / "helpers" / "sharded_logits.py"


@pytest.mark.parametrize("kind, heads", [("0", 2), ("4", 2), ("fla", 1)])
def test_two_processes_give_the_logits_of_one(tmp_path, monkeypatch, kind, heads):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import sharded_logits

    out = tmp_path / "logits.safetensors"
    launch = [str(Path(sys.executable).parent / "mlx.launch"), "-n", "2", "--backend", "ring"]
    done = subprocess.run(
        [*launch, sys.executable, str(SCRIPT), str(out), kind],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert out.exists(), done.stderr[-2000:]
    saved = mx.load(str(out))
    assert saved["heads"].item() == heads
    assert difference(saved["logits"], sharded_logits.logits(sharded_logits.model(kind))) < (
        5 * MODEL_SPLIT
    )


class Group:
    """Only the size and rank of a group."""

    def __init__(self, size: int):
        self.size, self.rank = (lambda: size), (lambda: 0)


def test_a_group_of_one_changes_nothing():
    model = tiny_model()
    before = model.layers[0].self_attn.q_proj
    shard(model, Group(1))
    assert model.layers[0].self_attn.q_proj is before


@pytest.mark.parametrize("size, what", [(3, "KDA heads"), (8, "KDA heads"), (16, "KDA heads")])
def test_a_split_that_does_not_divide_is_refused(size, what):
    with pytest.raises(UserError, match=what):
        shard(tiny_model(), Group(size))
    with pytest.raises(UserError, match="MLA heads"):
        shard(tiny_model(num_heads=size), Group(size))


def test_quantisation_groups_that_do_not_divide_are_refused():
    model = tiny_model()
    nn.quantize(model, 32, 4)
    with pytest.raises(UserError, match="quantisation groups"):
        shard(model, Group(2))
