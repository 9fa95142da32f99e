"""No command imports from the current folder, nor does a Python that it starts: anybody may have put a json.py there."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from test_imports import sources

from summa3d import interpreter
from summa3d.nn.config import ModelConfig
from summa3d.plan.search.cells import StageGrid
from summa3d.plan.search.store import Store

MODULES = (
    *("array", "ast", "collections", "concurrent", "ctypes", "difflib", "enum", "functools", "hashlib", "importlib", "json"),
    *("logging", "matplotlib", "mpi4py", "multiprocessing", "numpy", "pickle", "queue", "random", "re", "runpy", "safetensors"),
    *("selectors", "shutil", "signal", "socket", "struct", "subprocess", "tempfile", "tokenizers", "tomllib", "torch", "types"),
    *("sitecustomize", "usercustomize", "summa3d", "warnings"),
)
"""What is planted; each says that it ran, and cannot be imported."""
PLAN = "plan --model hidden=64 layers=2 heads=4 vocabulary=256 sequence=64 --cluster server --ranks 2 --batch 4"
LAUNCH = "launch -n 2 gemm --m 8 --n 8 --k 8"
SWEEP = "sweep run product-strong --set ranks=2 --set m=64 --set n=64 --set k=64 --set rounds=1 --dir sw"
ALONE = ("config", "train demo --dry-run --ranks 2", "checkpoint inspect .", "generate . --prompt a", "report none.json")
ALONE += (
    "plot none",
    "bench gemm --m 8 --n 8 --k 8 --rounds 1",
    "plan schedule --pp 2 --micro-batches 2",
    "sweep plan product-strong",
)


def planted(folder: Path) -> None:
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"open('RAN', 'a').write('{name} ')\nraise ImportError('the planted {name}')\n")


def ran(folder: Path, line: str) -> tuple[int, str, str]:
    """Status, stderr, and what of the planted has run when the installed command runs in the folder."""
    program = str(Path(sys.executable).with_name("summa3d"))
    environ = {**jobs.environment(), "SUMMA3D_CACHE": str(folder / "cache")}
    done = subprocess.run([program, *line.split()], cwd=folder, env=environ, capture_output=True, text=True, timeout=200)
    said = folder / "RAN"
    return done.returncode, done.stderr, said.read_text() if said.exists() else ""


@pytest.mark.parametrize(
    "line", [LAUNCH, SWEEP, pytest.param(PLAN, marks=pytest.mark.wide), "doctor"], ids=lambda line: line.split()[0]
)
def test_a_command_that_starts_pythons_imports_nothing_from_the_current_folder(line: str, tmp_path: Path) -> None:
    planted(tmp_path)
    status, said, found = ran(tmp_path, line)
    assert (status, found) == (0, ""), said


@pytest.mark.wide
def test_the_processes_of_plan_import_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    planted(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUMMA3D_CACHE", str(tmp_path / "cache"))
    inner = StageGrid(ModelConfig(layers=1, hidden=16, heads=2), "oned", (("y", 2),), "none", False, "float32", "cpu", 1)
    store = Store(processes=1)
    store.begin(inner)
    assert store.cells(inner, 1)[0].kinds
    store.close()
    assert not (tmp_path / "RAN").exists() and capfd.readouterr().err == "" and interpreter.VARIABLE not in os.environ


@pytest.mark.wide
@pytest.mark.parametrize("line", ALONE)
def test_a_command_imports_nothing_from_the_current_folder(line: str, tmp_path: Path) -> None:
    planted(tmp_path)
    _, said, found = ran(tmp_path, line)
    assert found == "" and "planted" not in said


def test_a_script_has_its_own_folder_and_not_the_current_one(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    planted(tmp_path)
    (tmp_path / "own/beside.py").write_text("import json\nVALUE = json.loads('7')\n")
    (tmp_path / "own/script.py").write_text("import beside, summa3d\nassert beside.VALUE == 7\n")
    status, said, found = ran(tmp_path, "launch -n 1 own/script.py")
    assert (status, found) == (0, ""), said


def test_every_python_that_the_library_starts_takes_its_arguments_from_one_place() -> None:
    """`sys.executable` is followed by words of `summa3d.interpreter`, or by words that its caller has from there."""
    found = {}
    for name, file in sources().items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.List) and any(ast.unparse(one) == "sys.executable" for one in node.elts):
                place = next(place for place, one in enumerate(node.elts) if ast.unparse(one) == "sys.executable")
                found[name, node.lineno] = ast.unparse(node.elts[place + 1])
    of_callers = {one for one in found if found[one] == "*arguments"}
    assert {name for name, _ in of_callers} == {"summa3d.cli.launch"} and len(found) > len(of_callers)
    assert all(words.startswith("*interpreter.") for one, words in found.items() if one not in of_callers), found


@pytest.mark.parametrize("variable", [None, "1"])
def test_arguments_for_python_3_10_leave_the_current_folder_out_and_no_other(
    variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter.sys, "version_info", (3, 10))
    planted(tmp_path)
    (tmp_path / "on_path").mkdir()
    (tmp_path / "on_path/there.py").write_text("import sys\nprint(__name__, *sys.argv[1:])\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}/on_path", **({interpreter.VARIABLE: variable} if variable else {})}
    for words, wanted in (
        (interpreter.module("there", "a", "b"), "__main__ a b"),
        (interpreter.program("import json, there"), "there"),
    ):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr) == (wanted, "")
