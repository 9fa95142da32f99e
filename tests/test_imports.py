"""The one direction of imports, and what importing summa3d must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest

ROOT = Path(__file__).parent.parent
# Each part may import itself and those before it.
ORDER = (
    "errors",
    "files",
    "dtypes",
    "cluster",
    "node_support",
    "waiting",
    "interpreter",
    "preemption",
    "blas_library",
    "figures",
    "columns",
    "table",
    "jobs",
    "kernels",
    "comm",
    "layout",
    "gemm",
    "autograd",
    "nn",
    "parallel",
    "dry",
    "train",
    "plan",
    "launcher",
    "bench",
    "sweep",
    "cli",
)
HEAVY = ("torch", "cupy")


def sources() -> dict[str, Path]:
    """Dotted module name → file, of everything installed as summa3d."""
    found = {}
    for folder, package in (("summa3d", ("summa3d",)), ("kernels", ("summa3d", "kernels"))):
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = (*package, *file.relative_to(ROOT / folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(module: str, file: Path, text: str | None = None) -> Iterator[str]:
    """Dotted names that a module's file imports anywhere, relative ones resolved; type-checking imports count too.

    text : what to read in place of the file's own.
    """
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8") if text is None else text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def part_of(name: str) -> str | None:
    """The part of summa3d that a dotted name belongs to; None for other packages and for summa3d itself."""
    parts = name.split(".")
    return parts[1] if parts[0] == "summa3d" and len(parts) > 1 and parts[1] in ORDER else None


def back_edges(modules: dict[str, Path]) -> list[str]:
    return [
        f"{module} imports {name}"
        for module, file in modules.items()
        for name in imports_of(module, file)
        if (own := part_of(module)) and (other := part_of(name)) and ORDER.index(other) > ORDER.index(own)
    ]


def test_imports_go_one_way() -> None:
    modules = sources()
    assert {part_of(module) for module in modules} >= {"errors", "comm", "layout", "gemm", "cli"}
    assert back_edges(modules) == []


def test_every_part_has_its_place_in_the_order() -> None:
    parts = {module.split(".")[1] for module in sources() if "." in module} - {"__main__"}
    assert parts <= set(ORDER)


@pytest.mark.parametrize("line", ["from ..train import loop", "import summa3d.cli.main", "def f():\n    from .. import nn"])
def test_a_back_edge_is_found_wherever_it_hides(tmp_path: Path, line: str) -> None:
    (tmp_path / "grid.py").write_text(line + "\n")
    assert len(back_edges({"summa3d.comm.grid": tmp_path / "grid.py"})) == 1


BOTH_WAYS = {
    "cli/bench": "a command as those beside it: it takes options of gemm, and sweep takes its own",
    "gemm/elements": "matrices have its functions as methods; both read the block, layout and grid that products read too",
    "nn/models": "the choice of a grid builds a model to measure it; models are made of a model's sizes",
    "nn/schemes": "parameters are made on a scheme, and schemes read the model's sizes, which users write beside both",
    "plan/search": "the choice of a plan for one run is one search, which prices what plan/ predicts",
    "train/checkpoint": "runs save and resume; checkpoints read the run's configuration, which is a file's keys beside both",
    "train/data": "runs read tokens; corpora read the run's configuration, which is a file's keys beside both",
}
"""Sub-folders that import from their parent and are imported by it, and why that stays."""


def both_ways(modules: dict[str, Path]) -> set[str]:
    """Folders of which a file imports one of the parent folder, which has a file that imports one of the folder."""
    packages = {module for module, file in modules.items() if file.name == "__init__.py"}
    edges = set()
    for module, file in modules.items():
        for name in imports_of(module, file):
            other = name if name in modules else name.rpartition(".")[0]
            if other in modules and not {module, other} & packages:
                edges.add((module.rpartition(".")[0], other.rpartition(".")[0]))
    return {
        folder.removeprefix("summa3d.").replace(".", "/")
        for folder in packages
        if folder.count(".") > 1 and edges >= {(folder, parent := folder.rpartition(".")[0]), (parent, folder)}
    }


def test_sub_folders_face_one_way_but_for_those_with_a_reason() -> None:
    assert both_ways(sources()) == set(BOTH_WAYS)


def test_a_sub_folder_that_faces_both_ways_is_found(tmp_path: Path) -> None:
    texts = {"nn": "", "nn.layer": "from .models.gpt import GPT", "nn.models": "", "nn.models.gpt": "from ..layer import Linear"}
    modules = {f"summa3d.{name}": tmp_path / name / ("layer.py" if text else "__init__.py") for name, text in texts.items()}
    for file, text in zip(modules.values(), texts.values(), strict=True):
        file.parent.mkdir()
        file.write_text(text)
    assert both_ways(modules) == {"nn/models"}


NUMPY_ALONE = (
    "summa3d",
    "summa3d.gemm",
    "summa3d.comm",
    "summa3d.layout",
    "summa3d.cli.main",
    "summa3d.nn",
    "summa3d.nn.schemes.scheme",
    "summa3d.parallel.simulate",
    "summa3d.train.config",
)


@pytest.mark.parametrize("module", NUMPY_ALONE)
def test_importing_loads_neither_torch_nor_cupy(module: str) -> None:
    program = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[]", done.stderr


def test_importing_summa3d_starts_no_mpi() -> None:
    program = "import sys, summa3d, summa3d.cli.main, summa3d.parallel.simulate; print('mpi4py.MPI' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "False", done.stderr


def test_public_names_load_on_demand() -> None:
    program = "import summa3d; print(all(hasattr(summa3d, name) for name in [*summa3d.__all__, 'gemm', 'layout', 'errors']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "True", done.stderr
    program = "import summa3d; summa3d.nothing"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert "has no attribute 'nothing'" in done.stderr


@pytest.mark.parametrize(
    "first",
    [
        "summa3d.nn.schemes.scheme",
        "summa3d.nn.context",
        "summa3d.nn.config",
        "summa3d.nn.models.registry",
        "summa3d.nn.models.block",
    ],
)
def test_nn_offers_its_names_whatever_was_imported_first(first: str) -> None:
    program = f"import inspect, {first}, summa3d.nn as nn; print([n for n in nn.__all__ if inspect.ismodule(getattr(nn, n))])"
    done = subprocess.run([jobs.python(), "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[]", done.stderr


def test_kernels_are_installed_as_a_part_of_summa3d(tmp_path: Path) -> None:
    program = "import importlib.util; print(importlib.util.find_spec('summa3d.kernels').origin)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert Path(done.stdout.strip()).parent.name == "kernels", done.stderr
