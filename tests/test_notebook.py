"""The notebook of examples/ prints what it shows, on ranks that its cells start; drawn are its pictures, but not compared."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import jobs
import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "notebook.ipynb"


def test_the_cells_of_the_notebook_print_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cloudpickle", "torch"):
        pytest.importorskip(name)
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    monkeypatch.setattr(sys, "executable", jobs.python())
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    shown = ["".join("".join(output.get("text", "")) for output in cell["outputs"]) for cell in cells]
    pictures = [sum("image/png" in output.get("data", {}) for output in cell["outputs"]) for cell in cells]
    for cell, text in zip(cells, shown, strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), names)
        assert printed.getvalue() == text
    assert sum(pictures) == 2 and len("".join(shown).splitlines()) == 12
