"""The programs in examples/ run and print what they promise."""

import subprocess
import sys

import pytest
from helpers.paths import EXAMPLES
from helpers.paused import LIMIT


def _run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_recurrence():
    lines = dict(line.split(": ", 1) for line in _run("recurrence.py").splitlines()[:5])
    assert lines["state"].startswith("(1, 2, 64, 64)")
    for name in ("chunkwise form, largest difference", "  of its final state"):
        assert float(lines[name]) < 1e-5
    assert float(lines["cut after 37 tokens, largest difference"]) < 1e-5


def test_ask():
    out = _run("ask.py", "What is an anchor?")
    assert out == "> What is an anchor?\nA mechanical device that prevents a vessel from moving.\n"


@pytest.mark.parametrize(
    ("policy", "verdict"), [("exact", "(right: it was 71432)"), ("window:64+4", "(wrong")]
)
def test_long_context(policy, verdict):
    out = _run("long_context.py", "--tokens", "600", "--policy", policy)
    assert verdict in out.splitlines()[-1]


def test_metal_kernel():
    first, second = _run("metal_kernel.py").splitlines()
    assert float(first.rsplit(" ", 1)[1]) < 1e-5
    assert second.endswith("race")
