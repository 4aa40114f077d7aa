"""docs/emulator.md: its programs print what it shows, and its tables are complete."""

import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_kda.runners import RUNNERS, metal_kernel
from mlx_kda.runners.fault import KINDS
from mlx_kda.runners.frontend import find_clang

PAGE = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.mark.skipif(find_clang() is None, reason="no clang 17 and no ziglang wheel")
def test_the_programs_print_what_the_page_shows(capsys):
    names = {}
    for (language, code), (following, shown) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True):
        if language == "python":
            exec(compile(code, "docs/emulator.md", "exec"), names)  # the page's own text
            if not following:
                assert capsys.readouterr().out == shown
    names["test_block_sums"]()


@pytest.mark.parametrize("heading, known", [("Check", RUNNERS), ("Kinds of faults", KINDS)])
def test_the_tables_are_complete(heading, known):
    section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", section, re.M)) == set(known)


def test_a_write_that_changes_nothing_is_no_race():
    """All threads of a group write the same number to one place."""
    kernel = metal_kernel(
        name="same",
        input_names=["x"],
        output_names=["y"],
        source="y[threadgroup_position_in_grid.x] = simd_sum(x[thread_position_in_grid.x]);",
        runner="emulator",
    )
    (y,) = kernel(
        inputs=[mx.ones(64)],
        grid=(64, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(2,)],
        output_dtypes=[mx.float32],
    )
    assert y.tolist() == [32, 32]
