"""Memory over long runs, in short: the benchmark `bench endurance` runs the long ones."""

import pytest

from mlx_kda.bench import endurance
from mlx_kda.cli.main import main


@pytest.mark.parametrize("policy", ["window:64+8", "window:64,int8"])
def test_c11_decoding_keeps_memory_flat(policy):
    """Case C11: after the window is full no array, no byte of MLX's and no cache byte is added."""
    rows = list(endurance.decode(1200, every=300, policy=policy, layers=4))
    first, *rest = rows
    assert len(rest) == 3
    for row in rest:
        assert row["arrays"] == first["arrays"] and row["cache_mb"] == first["cache_mb"]
        assert row["active_mb"] <= first["active_mb"] + 0.1
        assert row["resident_mb"] <= first["resident_mb"] + 4


def test_a_leak_would_show():
    """The count of live arrays sees one that is kept at every step."""
    before, kept = endurance.live_arrays(), []
    for _ in range(5):
        kept.append(endurance.mx.zeros((1,)))
    assert endurance.live_arrays() == before + len(kept)


def test_a_prompt_through_a_window_ends_with_the_peak_of_a_shorter_one():
    short, long = endurance.prompts([5_000, 9_000], policy="window:512+16", layers=4)
    assert long["cache_mb"] == short["cache_mb"]
    assert long["mlx_peak_mb"] < 1.02 * short["mlx_peak_mb"]
    # without a window the latents of the longer prompt would show
    exact = next(iter(endurance.prompts([9_000], policy="exact", layers=4)))
    assert exact["cache_mb"] > 3 * long["cache_mb"]


def test_the_command(capsys, tmp_path):
    argv = ["bench", "endurance", "--steps", "0", "--prompts", "10", "--out", str(tmp_path)]
    assert main(argv) == 0
    assert "peak MB" in capsys.readouterr().out
    assert (tmp_path / "endurance.csv").exists()
