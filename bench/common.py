"""Shared by the benchmark scripts: a clean environment, starting ranks, and verdicts on claims."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from summa3d.cli.doctor import BLAS_OVERRIDES  # noqa: E402
from summa3d.cli.launch import mpi_command  # noqa: E402
from summa3d.launcher.runtime import THREAD_VARIABLES  # noqa: E402


def environment(threads: int | None = 1) -> dict[str, str]:
    """This process's environment for a child: this checkout on PYTHONPATH, `threads` BLAS threads, no OpenBLAS overrides."""
    kept = {name: value for name, value in os.environ.items() if name not in (*BLAS_OVERRIDES, *THREAD_VARIABLES)}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH", ""))))
    return kept if threads is None else {**kept, **dict.fromkeys(THREAD_VARIABLES, str(threads))}


def printed(command: Sequence[str], environ: Mapping[str, str], folder: Path | None = None) -> str:
    """Return what a command prints, which runs in `folder`. One that fails ends the script."""
    done = subprocess.run(command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def on_ranks(ranks: int, arguments: Sequence[str], started_by: Sequence[str] = ()) -> str:
    """Return what `python ARGUMENTS…` prints on `ranks` ranks of this interpreter's own MPI, one BLAS thread each.

    started_by : a program and its arguments that start the launcher in their turn
    """
    command, environ, _ = mpi_command(ranks, list(arguments), environment())
    return printed([*started_by, *command], environ)


def from_ranks(ranks: int, *arguments: object, started_by: Sequence[str] = ()) -> Any:
    """Return the JSON in the last line that `python ARGUMENTS…` prints on `ranks` ranks."""
    return json.loads(on_ranks(ranks, [*map(str, arguments)], started_by).splitlines()[-1])


def itself(ranks: int) -> Any:
    """Return the JSON that this script prints on `ranks` ranks, told by --on-ranks besides its own options."""
    return from_ranks(ranks, *sys.argv, "--on-ranks")


def from_nodes(nodes: int, port: str, *arguments: object, ranks: int | None = None) -> Any:
    """Return the JSON in the last line that `python ARGUMENTS…` prints on emulated nodes. Needs root.

    port : the rate of a node's port, such as 100mbit. ranks : of all nodes; by default one each
    """
    network = ["--emulate", f"nodes={nodes},port={port}", "-n", str(ranks or nodes)]
    command = [sys.executable, "-m", "summa3d", "launch", *network, *map(str, arguments)]
    return json.loads(printed(command, environment()).splitlines()[-1])


def options(
    doc: str | None, rounds: int | None = None, what: str = "Time this many interleaved rounds."
) -> argparse.ArgumentParser:
    """The options that scripts share. With --on-ranks, a script that starts itself on ranks is told that it is there.

    rounds, what : the default of --rounds, which a script without one lacks, and its help
    """
    parser = argparse.ArgumentParser(description=doc)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=what)
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the result to FILE.")
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    return parser


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


def quotient(peer: Sequence[float], ours: Sequence[float]) -> Any:
    """The peer's time ÷ ours, of rounds in turn, with its interval."""
    from summa3d.bench.statistics import ratio

    return ratio(peer, ours)


def beside(what: str, name: str, peer: Sequence[float], ours: Sequence[float]) -> str:
    """Both sides' times in milliseconds, and the peer's ÷ ours, as text."""
    found = quotient(peer, ours)
    sides = f"{what}: ours {median(ours) * 1e3:.1f} ms, {name} {median(peer) * 1e3:.1f} ms"
    return f"{sides}; {name} ÷ ours {found.middle:.2f} [{found.ends} {'range' if found.is_range else '95 %'}]"


def not_slower(name: str, middles: Mapping[str, float]) -> tuple[str, bool]:
    """The claim that ours is not slower at the median: what was raced → the peer's time ÷ ours."""
    worst = min(middles, key=lambda what: middles[what])
    return f"{name} ÷ ours ≥ 1: the least is {middles[worst]:.2f} ({worst})", middles[worst] >= 1.0


def verdict(claim: str, held: bool) -> str:
    """The line that says whether a claim holds."""
    return f"{'holds' if held else 'DOES NOT HOLD'}: {claim}"


def conclude(claims: Iterable[tuple[str, bool]]) -> None:
    """Print a line for each claim."""
    for claim, held in claims:
        print(verdict(claim, held))


def save(result: Mapping[str, Any], path: Path | None) -> None:
    """Write the result as JSON to `path`; None writes nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        note(f"written: {path}")
