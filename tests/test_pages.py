"""Every code block of README.md, CONTRIBUTING.md and docs/: Python runs, commands exist, outputs are those that are shown."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from pathlib import Path

import jobs
import pages
import pytest

BLOCKS = list(pages.with_outputs())
PYTHON = [pair for pair in BLOCKS if pair[0].language == "python" and not pair[0].note.startswith("then: ")]
SHELL = [pair for pair in BLOCKS if pair[0].language == "bash"]
EXAMPLES = {"any_layouts.py": 4, "four_cases.py": 4, "layouts.py": 4, "own_module.py": 8, "product.py": 8, "scalapack.py": 4}


def ranks_of(block: pages.Block) -> int:
    return int(block.note.removeprefix("ranks: ").removesuffix(", wide") or 1)


def marked(block: pages.Block, shown: pages.Block | None) -> object:
    return pytest.param(block, shown, marks=[pytest.mark.wide] if block.note.endswith(", wide") else [])


def test_pages_have_blocks_of_known_kinds_alone() -> None:
    assert len(PYTHON) >= 5 and len(SHELL) >= 10
    for block, _ in BLOCKS:
        assert block.language in ("python", "bash", "text"), f"{block} has the language {block.language!r}"
        assert block.language != "text" or block.page == "README.md", f"{block}: output without a note is not compared"
        assert block.note in ("", "run") or block.note.startswith(("ranks: ", "then: ")), f"{block} has the note {block.note!r}"


@pytest.mark.parametrize(("block", "shown"), [marked(*pair) for pair in PYTHON], ids=lambda value: str(value) if value else "")
def test_python_runs_and_prints_what_is_shown(block: pages.Block, shown: pages.Block | None, tmp_path: Path) -> None:
    if "torch" in block.body:
        pytest.importorskip("torch")
    if "libmkl_scalapack" in block.body and not [*Path(sys.prefix, "lib").glob("libmkl_scalapack_lp64.so.*")]:
        pytest.skip("the extra mkl, whose ScaLAPACK it calls, is not installed")
    script = tmp_path / "example.py"
    script.write_text(block.body, encoding="utf-8")
    ranks = ranks_of(block)
    ended = jobs.run([str(script)], ranks, tmp_path, 300) if ranks > 1 else jobs.run_serial([str(script)], cwd=tmp_path)
    assert ended.status == 0, ended.stderr
    pages.check_output(shown, ended.stdout)


@pytest.mark.parametrize(("block", "shown"), SHELL, ids=lambda value: str(value) if value else "")
def test_commands_can_be_given(block: pages.Block, shown: pages.Block | None) -> None:
    found = list(pages.commands(block))
    assert found, block
    for words in found:
        pages.check_command(words, block)
    assert shown is None or block.note == "run" or block.note.startswith("then: "), (
        f"{shown} shows the output of a block that is not run"
    )


@pytest.mark.parametrize(
    ("block", "shown"), [pair for pair in SHELL if pair[0].note == "run"], ids=lambda value: str(value) if value else ""
)
def test_cheap_commands_print_what_is_shown(block: pages.Block, shown: pages.Block | None, tmp_path: Path) -> None:
    for line in block.body.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "summa3d", f"{block}: only commands of summa3d are run"
        ended = jobs.run_serial(["-m", "summa3d", *arguments], cwd=tmp_path)
        assert ended.status == 0, ended.stderr
        pages.check_output(shown, ended.stdout)


STORIES = {block.note: block.page for block, _ in BLOCKS if block.note.startswith("then: ")}


@pytest.mark.parametrize("story", STORIES)
def test_blocks_that_go_on_print_what_is_shown(
    story: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    for block, shown in (pair for pair in BLOCKS if pair[0].note == story):
        assert block.page == STORIES[story] and (shown is not None or block.language == "bash"), block
        if block.language == "python":
            capsys.readouterr()
            exec(compile(block.body, str(block), "exec"), {"__name__": str(block)})
            pages.check_output(shown, capsys.readouterr().out)
            continue
        for words in pages.commands(block):
            assert words[0] == "summa3d", f"{block}: only commands of summa3d are run"
            ended = jobs.run_serial(["-m", "summa3d", *words[1:]], cwd=tmp_path)
            assert ended.status == 0, f"{block}: {ended.stderr}"
            pages.check_output(shown, ended.stdout)


def code_of(text: str) -> str:
    """A program without its docstring and blank lines."""
    tree = ast.parse(text)
    return ast.unparse(ast.Module(tree.body[1:] if ast.get_docstring(tree) else tree.body, []))


def test_every_example_is_on_a_page_that_runs_it_on_the_ranks_that_it_names() -> None:
    folder = pages.ROOT / "examples"
    assert {file.name for file in folder.glob("*.py")} == set(EXAMPLES)
    run = {code_of(block.body): ranks_of(block) for block, _ in PYTHON}
    for name, ranks in EXAMPLES.items():
        text = (folder / name).read_text(encoding="utf-8")
        assert run.get(code_of(text)) == ranks and f"mpiexec -n {ranks} " in text, name


@pytest.mark.parametrize(
    "line", ["summa3d gemm --m 4 --n 4 --k 4 --nothing", "summa3d launch -n 2 train demo --set train.nothing=1", "make nothing"]
)
def test_a_command_that_cannot_be_given_is_found(line: str) -> None:
    from summa3d.errors import ConfigError

    block = pages.Block("page.md", 1, "bash", "", line + "\n")
    with pytest.raises((SystemExit, ConfigError, AssertionError)):
        for words in pages.commands(block):
            pages.check_command(words, block)


FOLDER_PAGES = sorted(
    file for folder in ("bench", "kernels", "summa3d", "tests") for file in (pages.ROOT / folder).rglob("README.md")
)
NAMED = [*pages.PAGES, *FOLDER_PAGES]


@pytest.mark.parametrize("page", NAMED, ids=lambda page: str(page.relative_to(pages.ROOT)))
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    assert pages.missing_paths(page.read_text(encoding="utf-8"), page.parent) == []


@pytest.mark.parametrize("page", NAMED, ids=lambda page: str(page.relative_to(pages.ROOT)))
def test_every_dotted_name_that_a_page_has_is_there(page: Path) -> None:
    if page.parent.name == "api":
        pytest.skip("test_public.py and the site's build look at these names")
    pytest.importorskip("torch")
    assert pages.missing_names(page.read_text(encoding="utf-8")) == []


def test_what_is_looked_for_stands_in_the_file_that_is_named() -> None:
    text = (pages.ROOT / "docs" / "where.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| [^|]* \| `([\w/.]+\.py)` \| `(\w+)` \|$", text, re.MULTILINE)
    assert len(rows) >= 40
    assert [(file, name) for file, name in rows if not re.search(rf"\b{name}\b", (pages.ROOT / file).read_text())] == []


def test_the_keys_of_a_dry_run_are_those_of_its_page() -> None:
    pytest.importorskip("torch")
    from summa3d.train import config
    from summa3d.train.dry_run import TERMS, predict

    text = (pages.ROOT / "docs" / "dry-run.md").read_text(encoding="utf-8")
    keys = re.findall(r"^\| (`.+`) \| .+ \|$", text, re.MULTILINE)
    found = predict(config.load("demo", ["grid.z=2", "model.layers=1", "device=cpu"]))
    assert re.findall(r"\w+", " ".join(keys)) == list(found)
    terms = re.findall(r"^\| (\w+) \| ", text.partition("## What is counted")[2].partition("##")[0], re.MULTILINE)
    assert terms == ["term", *TERMS]


def test_every_folder_of_the_package_is_on_the_page_of_what_is_where() -> None:
    text = (pages.ROOT / "docs" / "where.md").read_text(encoding="utf-8")
    folders = [file.parent for root in ("summa3d", "kernels") for file in (pages.ROOT / root).rglob("__init__.py")]
    named = [f"`{folder.relative_to(pages.ROOT)}/`" for folder in folders if folder.name != "summa3d"]
    assert [folder for folder in named if folder not in text] == []


def test_a_path_and_a_name_that_are_not_there_are_found() -> None:
    text = "`tests/plain_*.py`, [a](nothing.md#b), `summa3d/comm/ring.py`, `bench/build/x`, `nn/volume.py`, `gemm.py`, `make.py`"
    assert pages.missing_paths(text, pages.ROOT / "docs") == [
        "gemm.py",
        "make.py",
        "nn/volume.py",
        "nothing.md",
        "summa3d/comm/ring.py",
    ]
    assert pages.missing_names("`summa3d.gemm.volume`, `summa3d.nn.volume_models`, `nn.memory`, `nn.MLP`") == [
        "nn.memory",
        "summa3d.nn.volume_models",
    ]


def test_another_output_is_found() -> None:
    for note in ("prints", "shows"):
        shown = pages.Block("page.md", 1, "text", note, "words 7\n")
        pages.check_output(shown, "words 7\n")
        with pytest.raises(AssertionError):
            pages.check_output(shown, "words 8\n")
