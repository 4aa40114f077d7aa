"""The pages for readers name files that exist."""

import re

import pytest
from helpers.paths import ROOT

PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_on_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(
        r"\b((?:tests|mlx_kda|benchmarks|examples|metal|convert)/[\w./-]+\.\w+)", text
    )
    linked = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = {path for path in named if not (ROOT / path).exists()}
    missing |= {link for link in linked if not (page.parent / link).exists()}
    assert not missing
