"""What is public is what docs/public.md says, is documented, and stands on the API's pages; the package carries its types."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parent.parent
MODULES = (
    "summa3d",
    "summa3d.comm",
    "summa3d.layout",
    "summa3d.gemm",
    "summa3d.autograd",
    "summa3d.nn",
    "summa3d.train",
    "summa3d.errors",
)


def page() -> dict[str, set[str]]:
    """Module → names, of the table of docs/public.md."""
    text = (ROOT / "docs" / "public.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(summa3d[\w.]*)` \| (.+) \|$", text, re.MULTILINE)
    return {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_those_of_the_page(name: str) -> None:
    if name in ("summa3d.nn", "summa3d.train", "summa3d.autograd"):
        pytest.importorskip("torch")
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert set(module.__all__) == page()[name], f"docs/public.md and {name}.__all__ differ: is that meant? CHANGELOG.md says so"
    for public in module.__all__:
        value = getattr(module, public)
        assert value.__doc__ or public == "Ownership", f"{name}.{public} has no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_on_its_page_of_the_api(name: str) -> None:
    text = (ROOT / "docs" / "api" / f"{name.split('.')[-1]}.md").read_text(encoding="utf-8")
    assert re.findall(r"^::: (\S+)$", text, re.MULTILINE) == [
        f"{name}.{public}" for public in importlib.import_module(name).__all__
    ]


def test_no_module_besides_says_that_it_is_public() -> None:
    assert tuple(page()) == MODULES


def installed() -> dict[str, object]:
    """Return what setup.py hands to setuptools."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    return setup.call_args.kwargs


def test_the_package_carries_every_file_that_is_no_module() -> None:
    """Configurations, clusters, tables, kernels' sources and `py.typed`: a wheel has only what setup.py names."""
    setup, carried = installed(), set[Path]()
    for package, patterns in setup["package_data"].items():
        folder = ROOT / setup["package_dir"].get(package, package.replace(".", "/"))
        carried.update(path for pattern in patterns for path in folder.glob(pattern))
    needless = {".py", ".pyc", ".md"}
    files = {path for top in ("summa3d", "kernels") for path in (ROOT / top).rglob("*") if path.is_file()}
    assert {path for path in files if path.suffix not in needless} == carried and ROOT / "summa3d" / "py.typed" in carried
    modules = {path.parent for path in files if path.suffix == ".py"}
    folders = {setup["package_dir"].get(package, package) for package in setup["packages"]}
    places = {name.replace("summa3d.kernels", "kernels", 1).replace(".", "/") for name in folders}
    assert modules == {ROOT / place for place in places}


RECIPES = ("train", "plot", "bpe", "hdf5")


def test_recipes_name_what_the_package_needs_and_its_version() -> None:
    """Of the core's requirements and of some extras, each with its lowest version; conda's recipe makes the command too."""
    found = installed()
    needs = [*found["install_requires"], *(need for name in RECIPES for need in found["extras_require"][name])]
    spack = (ROOT / "packaging/spack/py-summa3d/package.py").read_text(encoding="utf-8")
    conda = (ROOT / "packaging/conda/meta.yaml").read_text(encoding="utf-8")
    for need in needs:
        name, lowest = re.match(r"(\w+)>=([\d.]+)", need).groups()
        assert f'depends_on("py-{name.replace("_", "-")}@{lowest.removesuffix(".0")}:' in spack, need
        if "python_version" not in need:
            conda_name = {"torch": "pytorch", "matplotlib": "matplotlib-base"}.get(name, name)
            assert f"- {conda_name} >={lowest}\n" in conda, need
    version, (command,) = found["version"], found["entry_points"]["console_scripts"]
    assert f"    - {command}\n" in conda
    assert f"version: {version}\n" in conda and f"version: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
