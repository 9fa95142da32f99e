"""Driver of Debian's ScaLAPACK: builds pgemm.c with Open MPI's mpicc, and runs it under Open MPI's mpirun.

`summa3d launch` is not used, because launcher and MPI library must belong together.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import HERE, environment, printed

from summa3d.launcher.runtime import launcher_vendor

SOURCE, PROGRAM = HERE / "pgemm.c", HERE / "build" / "pgemm"
LIBRARIES = ("-lscalapack-openmpi", "-lopenblas", "-lm", "-ldl")
PACKAGES = "libscalapack-openmpi-dev openmpi-bin libopenblas-pthread-dev"
# Ranks may outnumber cores: they must not be bound to cores, and must yield while they wait.
RUN = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1")
LETTER = {"float64": "d", "float32": "s"}


Sizes = tuple[int, int, int]  # m, n, k
Case = tuple[int, Sizes, str]  # ranks, sizes, dtype


class NotInstalled(Exception):
    """ScaLAPACK is not available; the message gives the reason in one line."""


@dataclass(frozen=True)
class Setting:
    """A process grid and a block size of ScaLAPACK."""

    rows: int
    columns: int
    block: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}:{self.block}"


class Scalapack:
    """The built driver. `blas` replaces OpenBLAS. The constructor raises NotInstalled where the driver cannot be built."""

    def __init__(self, blas: Path | None = None) -> None:
        self.extra = {} if blas is None else {"LD_PRELOAD": str(blas), "MKL_THREADING_LAYER": "SEQUENTIAL"}
        self.mpirun, mpicc = _of_openmpi("mpirun"), _of_openmpi("mpicc", is_launcher=False)
        if not PROGRAM.exists() or PROGRAM.stat().st_mtime < SOURCE.stat().st_mtime:
            _build(mpicc)
        self.libraries = _blas_libraries() if blas is None else [str(blas)]

    def run(self, ranks: int, sizes: Sizes, dtype: str, repeat: int, settings: list[Setting]) -> dict[str, Any]:
        """Run the driver and return its JSON: core type, speed of a core, and the seconds of `repeat` products per setting.

        A warm-up product of each setting is not counted.
        """
        options = [LETTER[dtype], *map(str, sizes), str(repeat), *map(str, settings)]
        command = [self.mpirun, *RUN, "-n", str(ranks), str(PROGRAM), *options]
        result: dict[str, Any] = json.loads(printed(command, environment() | self.extra).splitlines()[-1])
        return result


class Tuned:
    """ScaLAPACK tuned for one case.

    The first round tries every process grid with the first block size, and all block sizes on the best grid. Each round then
    runs the best `kept` settings.
    """

    def __init__(self, library: Scalapack, case: Case, blocks: list[int], kept: int = 2) -> None:
        self.library, self.case, self.blocks, self.kept = library, case, blocks, kept
        self.settings: list[Setting] = []

    def round(self, repeat: int) -> tuple[float, Setting, dict[str, Any]]:
        """The median seconds of the fastest setting of this round, that setting, and the driver's JSON."""
        if not self.settings:
            self._tune(max(1, repeat // 2))
        times, about = self._times(repeat, self.settings)
        best = min(times, key=lambda setting: times[setting])
        return times[best], best, about

    def _tune(self, repeat: int) -> None:
        ranks, first, *others = self.case[0], *self.blocks
        grids = [Setting(rows, ranks // rows, first) for rows in range(1, ranks + 1) if ranks % rows == 0]
        times, _ = self._times(repeat, grids)
        best = min(times, key=lambda setting: times[setting])
        if others:
            times |= self._times(repeat, [Setting(best.rows, best.columns, block) for block in others])[0]
        self.settings = sorted(times, key=lambda setting: times[setting])[: self.kept]

    def _times(self, repeat: int, settings: list[Setting]) -> tuple[dict[Setting, float], dict[str, Any]]:
        ranks, sizes, dtype = self.case
        found = self.library.run(ranks, sizes, dtype, repeat, settings)
        return {setting: median(one["seconds"]) for setting, one in zip(settings, found["results"], strict=True)}, found


def _of_openmpi(name: str, is_launcher: bool = True) -> str:
    """The path of a program of Open MPI: under Debian's own name, or under the plain name if it reports Open MPI."""
    named = shutil.which(f"{name}.openmpi")
    if named:
        return named
    plain = shutil.which(name)
    if plain and (launcher_vendor((plain,)) == "openmpi" if is_launcher else _compiles_for_openmpi(plain)):
        return plain
    raise NotInstalled(f"there is no Open MPI {name} here (Debian: apt install {PACKAGES})")


def _compiles_for_openmpi(mpicc: str) -> bool:
    done = subprocess.run([mpicc, "--showme:version"], capture_output=True, text=True)
    return "Open MPI" in done.stdout + done.stderr


def _build(mpicc: str) -> None:
    PROGRAM.parent.mkdir(exist_ok=True)
    done = subprocess.run([mpicc, "-O2", "-o", str(PROGRAM), str(SOURCE), *LIBRARIES], capture_output=True, text=True)
    if done.returncode != 0:
        telling = [line.strip() for line in done.stderr.splitlines() if "cannot find" in line or "error" in line]
        reason = (telling or ["no reason given"])[0]
        raise NotInstalled(f"pgemm.c cannot be built here: {reason} (Debian: apt install {PACKAGES})")


def _blas_libraries() -> list[str]:
    """The BLAS libraries that the driver loads, as ldd resolves them. Raises NotInstalled unless all are OpenBLAS."""
    done = subprocess.run(["ldd", str(PROGRAM)], env=environment(), capture_output=True, text=True)
    found = re.findall(r"^\s*(lib(?:open)?blas\S*) => (\S+)", done.stdout, re.MULTILINE)
    libraries = [f"{name} => {Path(path).resolve()}" for name, path in found]
    wrong = [line for line in libraries if "openblas" not in line.split("=>")[1]]
    if not libraries or wrong:
        what = ", ".join(wrong) or "none found"
        raise NotInstalled(f"the driver would use a BLAS that is not OpenBLAS: {what} (Debian: apt install {PACKAGES})")
    return libraries
