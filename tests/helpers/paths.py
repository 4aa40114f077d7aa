"""Where the tests' data and the repository's own files are."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
EXAMPLES = ROOT / "examples"
GOLDENS = TESTS / "goldens"
FLA_GOLDENS = TESTS / "goldens-fla"
