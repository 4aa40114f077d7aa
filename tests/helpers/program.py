"""Runs the program as a user does, in a process of its own."""

import subprocess
import sys

PROGRAM = [sys.executable, "-m", "mlx_kda.cli.main"]


def run(*argv: str, stdin: str = "") -> subprocess.CompletedProcess:
    """The finished process with its output as text."""
    return subprocess.run([*PROGRAM, *argv], input=stdin, capture_output=True, text=True)
