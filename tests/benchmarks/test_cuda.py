"""benchmarks/cuda_peers.py without a GPU: kernels in the emulator, bookkeeping, tables."""

import common
import cuda_mlx
import cuda_peers
import pytest

from mlx_kda.ops import reference64


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(cuda_mlx, "RUNNER", "emulator-fast")
    monkeypatch.setattr(cuda_mlx, "check", lambda: None)
    monkeypatch.setattr(cuda_peers, "D", 32)
    monkeypatch.setattr(cuda_peers, "SAMPLE_SECONDS", 1e-4)


def test_every_mlx_candidate_is_right_on_what_it_was_given(emulated):
    rows = list(cuda_peers.rows([1, 19], [2], kinds=("random", "repeated"), frameworks=["mlx"]))
    assert not [r for r in rows if "failed" in r]
    assert {r["candidate"] for r in rows} == {
        "ours, operations",
        "ours, kda_chunk exact",
        "ours, kda_chunk half",
        "ours, kda_recurrent",
        "mlx-lm, vector kernel",
        "mlx-lm, loop",
    }
    for row in rows:
        grade = 1e-6 if row["dtype"] == "float32" else 3e-3
        assert row["error"] < grade, row
        assert row["state_error"] < (1e-6 if "half" not in row["candidate"] else 5e-4), row


def candidate(name, call):
    x = cuda_peers.inputs("bounded", 4)
    truth = reference64.recurrence(*x.arrays())
    return cuda_peers.Candidate(name, "float32", x, call, lambda _: None, lambda r: (r, truth[1]))


def test_a_wrong_result_and_a_failure_are_reported():
    x = cuda_peers.inputs("bounded", 4)
    assert -5 < x.g.min() < -4 and x.g.max() > -1
    o, _ = reference64.recurrence(*x.arrays())

    def refuse():
        raise RuntimeError("not on\n this GPU")

    good, wrong, refused = cuda_peers._compare(
        [candidate("a", lambda: o), candidate("b", lambda: 2 * o), candidate("c", refuse)], True
    )
    assert good["error"] == 0 and wrong["error"] == pytest.approx(1)
    assert refused == {"candidate": "c", "dtype": "float32", "failed": "not on this GPU"}


def test_tables_have_times_ratios_errors_and_failures():
    base = {"row": "random", "H": 32, "dtype": "bfloat16", "spread": 0.01}
    rows = [
        {**base, "T": 512, "candidate": "ours, kda_chunk exact", "ms": 2.0},
        {**base, "T": 2048, "candidate": "ours, kda_chunk exact", "ms": 4.0,
         "error": 1e-7, "state_error": 2e-7},
        {**base, "T": 2048, "candidate": "mlx-lm, vector kernel", "ms": 12.0,
         "error": 3e-7, "state_error": 4e-7},
        {**base, "T": 512, "candidate": "mlx-lm, vector kernel", "ms": 9.0, "spread": 0.4},
        {**base, "T": 2048, "candidate": "FlashKDA", "failed": "wrong PyTorch"},
    ]  # fmt: skip
    text = cuda_peers.tables(rows)
    assert "| ours, kda_chunk exact | bfloat16 | 2 | 4 |" in text
    assert "| ours, kda_chunk exact | mlx-lm, vector kernel | bfloat16 | ~4.5 | 3 |" in text
    assert "| mlx-lm, vector kernel | bfloat16 | ~9 | 12 |" in text
    assert "| mlx-lm, vector kernel | bfloat16 | 3.0e-07 / 4.0e-07 |" in text
    assert "FlashKDA could not run: wrong PyTorch" in text and "1 of 5 rows have a spread" in text


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--frameworks", "jax"], "'jax'"),
        (["--heads", "3"], "even"),
        (["--frameworks", "mlx", "--tokens", "1"], "CUDA GPU"),
    ],
)
def test_mistakes_end_with_one_line(flags, word, fails):
    fails(common.run(None, cuda_peers.add_arguments, cuda_peers.main, flags), word)
