"""The README is short, and its product means what it says; `test_pages.py` runs its blocks."""

from __future__ import annotations

import re

import numpy as np
import pages
import pytest

README = pages.ROOT / "README.md"


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


def test_the_product_of_the_readme_is_right_and_counts_its_words() -> None:
    """The output that the README shows, which `test_pages.py` compares with the program's, against plain numpy."""
    shown, forecast = [after for block, after in pages.with_outputs() if block.page == "README.md" and block.language == "python"]
    assert shown is not None and forecast is not None
    shape, layout, words, norm = re.fullmatch(r"(\(.*\)) (\S+ \S+) (\d+) (\S+)\n", shown.body).groups()
    assert (shape, layout) == ("(67, 41)", "m:(x,z) n:y")
    assert int(words) == 67 * 101 + 101 * 41 + 67 * 41
    i, j = np.arange(101)[:, None], np.arange(101)[None, :]
    want = np.linalg.norm(np.sin(i[:67] + 2 * j) @ np.cos(3 * i - j[:, :41]))
    assert float(norm) == pytest.approx(want, rel=1e-9)


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8"))
    assert len(links) > 10 and all((pages.ROOT / link).exists() for link in links)
