"""Shared by the benchmark scripts: a clean environment, starting ranks, and verdicts on claims."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from summa3d.cli.doctor import BLAS_OVERRIDES  # noqa: E402
from summa3d.cli.launch import mpi_command  # noqa: E402
from summa3d.launch.runtime import THREAD_VARIABLES  # noqa: E402


def environment(threads: int | None = 1) -> dict[str, str]:
    """This process's environment for a child: this checkout on PYTHONPATH, `threads` BLAS threads, no OpenBLAS overrides."""
    kept = {name: value for name, value in os.environ.items() if name not in (*BLAS_OVERRIDES, *THREAD_VARIABLES)}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH", ""))))
    return kept if threads is None else {**kept, **dict.fromkeys(THREAD_VARIABLES, str(threads))}


def on_ranks(ranks: int, arguments: Sequence[str], threads: int | None = 1, started_by: Sequence[str] = ()) -> str:
    """What `python ARGUMENTS…` prints on `ranks` ranks of this interpreter's own MPI. A failed job ends the script.

    started_by : a program and its arguments that start the launcher in their turn
    """
    command, environ, _ = mpi_command(ranks, list(arguments), environment(threads))
    command = [*started_by, *command]
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def overhead(
    script: str, doc: str | None, ranks: int, option: str, default: int, what: str, measure: Callable[[int], None]
) -> tuple[dict[str, Any], Path | None]:
    """The JSON that `measure(COUNT)` prints on `ranks` ranks, with the load before, and where it is to be written.

    option, default, what : the option of the count, its default and its help. On the ranks themselves, measures and ends.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument(option, type=int, default=default, dest="count", help=what)
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the result to FILE.")
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_ranks:
        measure(args.count)
        sys.exit()
    load = os.getloadavg()[0]
    result = json.loads(on_ranks(ranks, [script, option, str(args.count), "--on-ranks"]).splitlines()[-1])
    return result | {"load": load}, args.json


def bench(ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    """The JSON of `summa3d bench ARGUMENTS…` on `ranks` ranks, one BLAS thread each."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        on_ranks(ranks, ["-m", "summa3d", "bench", *arguments, "--json", str(file)])
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def note(text: str) -> None:
    """Print a remark on stderr."""
    print(text, file=sys.stderr, flush=True)


def about(machine: Mapping[str, Any]) -> str:
    """One line on the machine of a result."""
    from summa3d.bench.tables import in_one_line

    return in_one_line(machine)


def verdict(claim: str, held: bool) -> str:
    """The line that says whether a claim holds."""
    return f"{'holds' if held else 'DOES NOT HOLD'}: {claim}"


def save(result: Mapping[str, Any], path: Path | None) -> None:
    """Write the result as JSON to `path`; None writes nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        note(f"written: {path}")
