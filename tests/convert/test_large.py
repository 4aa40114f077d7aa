"""A checkpoint of 300 MB: memory by the system's count, and the bits of the all-at-once path.

benchmarks/streaming.py does the same with 4 GB; docs/conversion.md has its numbers.
"""

import json
import os
import subprocess
import sys

import pytest
from helpers.paths import ROOT
from streaming import TASKS, broken, largest_layer, measured, page, tensor_hashes
from synthetic import write_synthetic

from mlx_kda.convert import convert, plan, verify

SHARD = 40_000_000


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The checkpoint, twelve layers of 24 MB, and its bytes."""
    folder = tmp_path_factory.mktemp("large") / "source"
    nbytes = write_synthetic(folder, layers=12, experts=14)
    assert 290e6 < nbytes < 345e6
    return folder, nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("bits", [None, 4])
def test_memory_is_that_of_a_layer_not_of_the_model(large, tmp_path, bits):
    """The peak is within a layer, a file and a slack; the bits are those of one go."""
    source, nbytes = large
    found = measured("ours", source, tmp_path / "ours", bits, SHARD)
    used, slack = found["peak"] - found["idle"], 110_000_000
    print(
        f"{used / 1e6:.0f} MB above an idle {found['idle'] / 1e6:.0f} MB, {found['seconds']:.1f} s"
    )
    # what the embedding takes, the largest tensor here, comes on top of the layer
    assert used < largest_layer(source) + SHARD + slack < nbytes * 0.6
    predicted = plan(source, tmp_path / "x", q_bits=bits, shard_bytes=SHARD).peak_bytes
    assert found["peak"] <= predicted < nbytes * 1.8
    TASKS["at-once"](source, tmp_path / "at-once", bits, SHARD)
    assert tensor_hashes(tmp_path / "ours") == tensor_hashes(tmp_path / "at-once")
    assert verify(tmp_path / "ours").ok


VERIFY = """
import json, sys
import mlx.core as mx
from mlx_kda.convert import verify
sys.path.insert(0, sys.argv.pop(1))
from memory import peak_resident
mx.eval(mx.quantize(mx.zeros((64, 64))))
idle = peak_resident()
found = verify(*sys.argv[1:], max_tokens=64)
print(json.dumps({"used": peak_resident() - idle, "ok": found.ok, "kl": found.comparison.kl}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_verify_holds_an_expert_not_a_layer(tmp_path):
    """It held a layer in float32, three times: 900 MB here, and over 20 GB for the 48B."""
    source = tmp_path / "source"
    write_synthetic(source, layers=2, experts=64, vocabulary=1000, shards=1)
    convert(source, tmp_path / "out", q_bits=4)
    line = [
        sys.executable,
        "-c",
        VERIFY,
        str(ROOT / "benchmarks"),
        str(tmp_path / "out"),
        str(source),
    ]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    assert facts["ok"] and facts["kl"] > 0
    layer = 64 * 3 * 512 * 512 * 4
    assert facts["used"] < 1.2 * layer, f"{facts['used'] / 1e6:.0f} MB"


def test_the_page_of_results_says_what_was_measured():
    row = {
        "recipe": "4 bits", "output_bytes": 10**9, "seconds": 12.0, "plain_seconds": 10.0,
        "ratio": 1.2, "cpu": 5.0, "plain_cpu": 4.0, "ratios": [1.1, 1.2, 1.3], "peak": 3e8,
        "idle": 1e8, "bound": 2e9,
        "at_once_peak": 5e9, "same_bits": True, "same_files": False, "kills": 10,
        "finished": [0, 1, 2],
    }  # fmt: skip
    row |= {"source_bytes": 4e9, "layers": 40, "experts": 64, "source_files": 8}
    row |= {"layer_bytes": 1e8}
    keys = ("command", "date", "commit", "chip", "cores", "memory_gb", "system", "device")
    text = page(dict.fromkeys(keys, "x"), [row])
    for words in ("1.20", "300 MB", "2 GB", "| NO |", "4 GB, 40 layers", "Not an Apple GPU"):
        assert words in text
    assert str(os.getcwd()) not in text
    assert broken([row]) == ["4 bits: the files after kills are not those of a run left alone"]
    assert len(broken([row | {"peak": 3e9, "ratio": 1.4, "same_bits": False}])) == 4
