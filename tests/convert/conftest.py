"""What the tests of conversions share."""

import pytest


@pytest.fixture(scope="module")
def source(tiny_hf):
    """The small random checkpoint, which no test changes."""
    return tiny_hf
