"""The pages of docs/ are what the code prints today."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_of_schemes_is_what_the_schemes_are():
    from summa3d.nn.schemes.scheme import SCHEMES

    script = runpy.run_path(str(DOCS / "schemes.py"))
    assert tuple(script["GRIDS"]) == SCHEMES
    assert script["page"]() == (DOCS / "schemes.md").read_text(), "run: python docs/schemes.py > docs/schemes.md"


def test_the_page_of_models_is_what_the_models_are():
    from summa3d.nn.config import FAMILIES

    script = runpy.run_path(str(DOCS / "models.py"))
    assert list(script["NOTES"]) == list(FAMILIES)
    assert script["page"]() == (DOCS / "models.md").read_text(), "run: python docs/models.py > docs/models.md"


def test_the_picture_of_the_grid_is_what_the_layouts_are():
    script = runpy.run_path(str(DOCS / "picture.py"))
    assert script["page"]() == (DOCS / "grid.svg").read_text(encoding="utf-8"), "run: python docs/picture.py > docs/grid.svg"


def test_the_page_of_keys_is_what_the_configuration_is():
    script = runpy.run_path(str(DOCS / "config.py"))
    assert script["page"]() == (DOCS / "config.md").read_text(encoding="utf-8"), "run: python docs/config.py > docs/config.md"
