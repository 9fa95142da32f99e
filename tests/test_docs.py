"""The pages of docs/ are what the code prints today."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


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


def test_the_picture_of_contexts_is_what_their_split_is_and_its_words_are_those_of_dry_runs(monkeypatch):
    from summa3d.train import config
    from summa3d.train.dry_run import predict

    monkeypatch.syspath_prepend(str(DOCS))  # where it finds the other script that it draws with
    script = runpy.run_path(str(DOCS / "contexts.py"))
    assert script["page"]() == (DOCS / "contexts.svg").read_text(encoding="utf-8"), "python docs/contexts.py > docs/contexts.svg"
    sizes = ("family=llama", "layers=1", "hidden=64", "heads=16", "kv_heads=4", "sequence=48")
    for kind, size in (("gather", 3), ("ring", 2), ("heads", 4)):
        asked = [*(f"model.{one}" for one in sizes), "scheme=serial", "train.batch=1", f"grid.cp={size}", f"context.kind={kind}"]
        moved = predict(config.load("demo", asked))["words"]
        assert moved["forward"]["cp"] + moved["backward"]["cp"] == script["words"](kind, size, shared=4) * 2 * 48 * 16, kind


def test_the_figure_of_the_readme_shows_what_is_counted_and_one_loss(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    script = runpy.run_path(str(DOCS / "front.py"))
    kept = json.loads((DOCS / "front.json").read_text(encoding="utf-8"))
    assert script["count_words"]() == kept["words"], "run: python docs/front.py --measure words"
    assert list(kept["losses"]) == list(script["GRIDS"]) and script["largest_difference"](kept["losses"]) < 1e-5
    assert {row["file"] for row in kept["rows"]} == {file.stem for file in script["ROWS"].glob("*.json")}
    monkeypatch.setattr(sys, "argv", ["front.py", "--out", str(tmp_path)])
    script["main"]()
    assert (tmp_path / "front.png").stat().st_size > 20_000


def test_the_page_of_keys_is_what_the_configuration_is():
    script = runpy.run_path(str(DOCS / "config.py"))
    assert script["page"]() == (DOCS / "config.md").read_text(encoding="utf-8"), "run: python docs/config.py > docs/config.md"


SEARCHED = (
    *("activation checkpointing", "vocab parallel", "process group", "sub-communicator", "device mesh", "reshard", "state_dict"),
    *(
        "double buffering",
        "roofline",
        "KV cache",
        "gradient accumulation",
        "tensor parallel size",
        "ZeRO stage",
        "micro batch size",
    ),
    *("p?gemm", "descriptor", "context parallel", "expert parallel", "Muon", "Weights & Biases"),
)
"""What people who come from elsewhere look for."""


def test_words_of_the_field_lead_to_a_page_or_are_said_not_to_be_here() -> None:
    pages = [file.read_text(encoding="utf-8").lower() for file in DOCS.glob("*.md") if file.name != "where.md"]
    assert [word for word in SEARCHED if not any(word.lower() in page for page in pages)] == []


def test_the_pages_that_are_written_by_hand_are_short() -> None:
    """Words outside of code blocks, of the pages that no script of docs/ prints; that of what is where is an index."""
    printed = {file.with_suffix(".md").name for file in DOCS.glob("*.py")} | {"where.md"}
    texts = [file.read_text(encoding="utf-8") for file in DOCS.glob("*.md") if file.name not in printed]
    assert sum(len(FENCED.sub("", text).split()) for text in texts) <= 24_000


def test_the_page_of_predicted_times_is_short() -> None:
    assert len((DOCS / "plan.md").read_text(encoding="utf-8").split()) <= 2500


@pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers needs Python 3.11")
def test_the_page_of_adopted_models_has_each_that_is_installed_and_says_what_is_so():
    """Two are tried again, without data: one that runs, and one that is refused."""
    transformers = pytest.importorskip("transformers")
    script, text = runpy.run_path(str(DOCS / "adopted.py")), (DOCS / "adopted.md").read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}," not in text:
        pytest.skip("the page is of another version of transformers")
    plans = script["kinds"]()
    assert f"All {len(plans)} of" in text and f"{sum(plans.values())} have a plan" in text
    assert [kind for kind in plans if f"`{kind}`" not in text] == []
    assert "| `llama` | 2e-15 |" in text and script["tried_without_data"]("llama")["verdict"] == script["RUNS"]
    assert f"| `mixtral` | {script['row'](script['tried_without_data']('mixtral'))} |" in text
