"""Traced cells on disk: one JSON file each, named by all that a trace depends on, the library's own code included."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache
from importlib import metadata
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ... import __version__
from ...dry.record import Op
from ...files import text_of
from ...interpreter import safe_spawning
from .cells import PASSES, Cells, LinearSize, OpLine, PassOps, StageGrid, traced

FORMAT = 4
PACKAGES = ("autograd", "comm", "dry", "gemm", "layout", "nn", "parallel", "train")
"""The packages whose code a trace depends on, beside the kernels and the search's own cells."""


def folder() -> Path:
    """The user's folder of traced cells: $SUMMA3D_CACHE, else $XDG_CACHE_HOME/summa3d, else ~/.cache/summa3d."""
    given = os.environ.get("SUMMA3D_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(given) if given else Path(base) / "summa3d") / "cells"


@cache
def code() -> str:
    """A fingerprint of the code that is traced: the library's sources, and torch's version."""
    root, digest = Path(__file__).parents[2], hashlib.sha256(metadata.version("torch").encode())
    folders = [*(root / package for package in PACKAGES), root.parent / "kernels", root / "kernels"]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    for file in [*files, Path(__file__).with_name("cells.py"), root / "plan" / "cells.py", root / "blas_library.py"]:
        digest.update(str(file.relative_to(root.parent)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def header(inner: StageGrid, single: bool) -> dict[str, Any]:
    """Header of the file of cells; another one is of other cells."""
    return {"format": FORMAT, "version": __version__, "code": code(), "of": inner.key(single)}


def file_of(inner: StageGrid, single: bool) -> Path:
    """The file of cells: named by its header."""
    return folder() / f"{hashlib.sha256(_header(inner, single).encode()).hexdigest()[:32]}.json"


@cache
def _header(inner: StageGrid, single: bool) -> str:
    return json.dumps(header(inner, single), sort_keys=True)


class Store:
    """Cells by what they depend on: of this process, of disk, or traced now.

    tell : is given a line for each file that cannot be used. processes : how many others may trace what is needed soon.
    traces, read : how many were traced, and read from disk.
    """

    def __init__(self, tell: Callable[[str], None] = lambda line: None, processes: int = 0) -> None:
        self.traces = self.read = 0
        self._tell, self._processes = tell, processes
        self._known: dict[tuple[StageGrid, bool], Cells | None] = {}
        self._pool: ProcessPoolExecutor | None = None
        self._begun: dict[StageGrid, Future[tuple[Cells | None, list[str]]]] = {}

    def cells(self, inner: StageGrid, units: int) -> tuple[Cells, int]:
        """The cells for micro-batches of so many units, and at how many units they are to be evaluated.

        Raises LayoutError, GridError and ConfigError where a run of these sizes would.
        """
        result = self._of(inner, False)
        if result is None and units % 2 == 0:  # half of a unit's causal heads may be no integer, that of two is one
            inner, units = replace(inner, unit=2 * inner.unit), units // 2
            result = self._of(inner, False)
        return self._at(inner, units) if result is None else (result, units)

    def _at(self, inner: StageGrid, units: int) -> tuple[Cells, int]:
        """The cells for micro-batches of `units` units, and 1."""
        result = self._of(replace(inner, unit=inner.unit * units), True)
        assert result is not None, "one trace is a line"
        return result, 1

    @property
    def idle(self) -> bool:
        """Return whether other processes may trace, and have less to do than keeps them busy."""
        return self._processes > 0 and sum(not item.done() for item in self._begun.values()) < 2 * self._processes

    def begin(self, inner: StageGrid) -> None:
        """Let another process trace cells that will be needed soon; those that are on disk are left there."""
        if (inner, False) in self._known or inner in self._begun or not self.idle or file_of(inner, False).exists():
            return
        with safe_spawning():
            if self._pool is None:
                self._pool = ProcessPoolExecutor(self._processes, get_context("spawn"), follow_parent)
            self._begun[inner] = self._pool.submit(kept, inner, False)

    def close(self) -> None:
        """End the other processes; what they have not begun is left."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool, self._processes = None, 0

    def _of(self, inner: StageGrid, single: bool) -> Cells | None:
        key = inner, single
        if key not in self._known:
            self._known[key] = self._loaded(inner, single)
        return self._known[key]

    def _loaded(self, inner: StageGrid, single: bool) -> Cells | None:
        if single or inner not in self._begun:
            try:
                results = _read(inner, single)
                self.read += 1
                return results
            except FileNotFoundError:
                pass
            except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
                self._tell(f"{file_of(inner, single)} is traced again: {error!r}")
        try:
            results, said = self._begun[inner].result() if not single and inner in self._begun else kept(inner, single)
        except BrokenProcessPool as error:
            self._tell(f"a process that traced cells has ended; the others are traced one by one: {error}")
            self._processes, self._begun = 0, {}
            results, said = kept(inner, single)
        self.traces += 1
        for line in said:
            self._tell(line)
        return results


def follow_parent() -> None:
    """Leave Ctrl-C to the process that is asked for the cells, and end with it however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def kept(inner: StageGrid, single: bool) -> tuple[Cells | None, list[str]]:
    """The cells, traced now and kept on disk; and what is to be said of that. Raises as `traced`."""
    result = traced(inner, single)
    body = {"header": json.loads(_header(inner, single)), "cells": None if result is None else _to_json(result)}
    file = file_of(inner, single)
    try:
        _write(file, json.dumps(body, separators=(",", ":")))
    except OSError as error:
        return result, [f"{file} cannot be kept: {error}"]
    return result, []


def _read(inner: StageGrid, single: bool) -> Cells | None:
    """The cells that are kept on disk. Raises FileNotFoundError, and ValueError and others for a damaged file."""
    whole = json.loads(text_of(file_of(inner, single)))  # whose header says that it is as it was written
    if json.dumps(whole["header"], sort_keys=True) != _header(inner, single):
        raise ValueError("its header is of other cells")
    return None if whole["cells"] is None else _from_json(whole["cells"])


def _write(file: Path, text: str) -> None:
    """Write a file that others see whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _to_json(cells: Cells) -> dict[str, Any]:
    kinds = [[*kind.op, *_flat(kind.slopes)] for kind in cells.kinds]
    every = {**cells.passes, "copies": cells.copies, "optimizer": cells.optimizer}
    pieces = {name: [[item.cell, *item.net, *item.top, [*_flat(item.ops)]] for item in of] for name, of in every.items()}
    parameters = {"elements": dict(cells.elements), "tensors": dict(cells.tensors)}
    return {"kinds": kinds, "pieces": pieces, **parameters, "kept": list(cells.kept)}


def _from_json(table: dict[str, Any]) -> Cells:
    fields = len(Op._fields)
    kinds = tuple(OpLine(Op._make(row[:fields]), _pairs(row[fields:])) for row in table["kinds"])
    pieces = {
        name: tuple(
            PassOps(cell, LinearSize(*net), LinearSize(*top), _pairs(ops))
            for cell, *four, ops in of
            for net, top in [(four[:2], four[2:])]
        )
        for name, of in table["pieces"].items()
    }
    passes = {way: pieces[way] for way in PASSES}
    parameters = table["elements"], table["tensors"]
    return Cells(kinds, passes, pieces["copies"], pieces["optimizer"], *parameters, LinearSize(*table["kept"]))


def _flat(pairs: tuple[tuple[int, int], ...]) -> Iterator[int]:
    return (number for pair in pairs for number in pair)


def _pairs(flat: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(flat[::2], flat[1::2], strict=True))
