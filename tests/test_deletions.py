"""What the sources may delete and write: each place that does is listed here, and was judged by the rules beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_imports import sources

TREES: set[str] = set()
"""Functions that delete folders with all that is in them: those that the same process has made, and no others."""
DELETIONS = {
    # by the library's own names, or by a name that the caller has matched
    "files.remove_files",
    "files.rename_folder",
    "comm.health.flight_files.remove",
    "comm.health.flight_files.claim",
    "train.prepare.open_folder",
    "train.lease.Lease.__exit__",
    "train.lease.Lease._claim",
    "train.lease.Lease._write",
    "sweep.measure.measure",
    "sweep.measure.measure.begin",
    # a file that is about to be made anew, exclusively
    "comm.health.flight_files.create",
    "gemm.files.steps.new_file",
    "train.checkpoint.safetensors.write_tensors",
    # a temporary file of this process, at a failure
    "files.replacing",
    "gemm.files.steps.replace",
    "plan.search.store._write",
    "train.checkpoint.shards.write",
    # segments of this user's ended jobs
    "launcher.segments.unname",
    "launcher.segments.remove_left",
}
RENAMES = {
    "files.replacing",
    "files.rename_folder",
    "gemm.files.steps.replace",
    "plan.search.store._write",
    "train.checkpoint.folder._delete",
    "train.checkpoint.folder._finish_deletion",
}
WRITES = {
    # exclusive, or without following a link
    "files.no_follow",
    "files.replacing",
    "comm.health.flight_files.create",
    "comm.health.flight_files.claim",
    "comm.health.flight_files.keep_open",
    "gemm.files.steps.new_file",
    "sweep.lines.append",
    "train.checkpoint.safetensors.write_tensors",
    "train.lease.Lease._open",
    "train.lease.Lease._claim",
    "train.metrics.open_at",
    # in a folder that the same function, or its caller, has just made
    "comm.health.flight_files._copy",
    "launcher.call.launch",
    "launcher.called.main",
    "launcher.emulate.Emulated.command",
    "train.data.corpus.encode",
    "train.data.tokens._encode_once",
    # a FIFO or a device that the user has named; /dev/null; another rank's memory
    "files.replace_text",
    "cli.main._run_for_reader",
    "comm.health.failure.abort",
    "comm.transport.node_memory.joined",
}
REMOVING, RENAMING = ("unlink", "remove", "rmdir", "removedirs"), ("rename", "renames", "replace")
COPYING = ("copyfile", "copytree", "copy2", "move")


def calls(tree: ast.AST, where: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.Call]]:
    """Each call in a module, with the dotted name of the function that makes it."""
    for node in ast.iter_child_nodes(tree):
        inner = (*where, node.name) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else where
        if isinstance(node, ast.Call):
            yield ".".join(where), node
        yield from calls(node, inner)


def kind_of(call: ast.Call) -> str | None:
    """Return what a call does to files: "trees", "deletions", "renames", "writes"; None where it does nothing to any."""
    if not isinstance(call.func, (ast.Attribute, ast.Name)):
        return None
    name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
    of = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    words = [ast.unparse(one) for one in (*call.args, *(keyword.value for keyword in call.keywords))]
    if name == "rmtree":
        return "trees"
    if name in REMOVING and (of == "os" or (name != "remove" and of)):
        return "deletions"
    if name in RENAMING and (of == "os" or name == "rename" or (of in ("part", "path") and len(call.args) == 1)):
        return "renames"
    if name in ("write_text", "write_bytes", "touch") and of not in ("new", "deadline"):  # `new` comes from `replacing`
        return "writes"
    if of == "os" and name == "open" and any(flag in words[1] for flag in ("O_CREAT", "O_WRONLY", "O_RDWR", "flags")):
        return "writes"
    if (name == "open" and of != "os") and any(mode in words for mode in ("'w'", "'wb'", "'a'", "'ab'", "'xb'", "'r+b'")):
        return "writes"
    return "writes" if of == "shutil" and name in COPYING else None


def found_in(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Kind → functions, without the name of the package."""
    found: dict[str, set[str]] = {"trees": set(), "deletions": set(), "renames": set(), "writes": set()}
    for module, file in modules.items():
        for where, call in calls(ast.parse(file.read_text(encoding="utf-8"))):
            if kind := kind_of(call):
                found[kind].add(f"{module.removeprefix('summa3d.')}.{where}")
    return found


def test_each_place_that_deletes_renames_or_writes_files_is_listed() -> None:
    assert found_in(sources()) == {"trees": TREES, "deletions": DELETIONS, "renames": RENAMES, "writes": WRITES}


@pytest.mark.parametrize(
    "line, kind",
    [
        ("shutil.rmtree(folder)", "trees"),
        ("from shutil import rmtree; rmtree(folder)", "trees"),
        ("(folder / name).unlink()", "deletions"),
        ("os.remove(path)", "deletions"),
        ("path.rename(other)", "renames"),
        ("file.write_text('x')", "writes"),
        ("open(path, 'w')", "writes"),
        ("path.open(mode='wb')", "writes"),
        ("os.open(path, os.O_RDWR)", "writes"),
        ("shutil.copytree(folder, other)", "writes"),
    ],
)
def test_a_new_place_is_found(tmp_path: Path, line: str, kind: str) -> None:
    (tmp_path / "a.py").write_text(f"def f():\n    {line}\n")
    assert found_in({"summa3d.a": tmp_path / "a.py"})[kind] == {"a.f"}
