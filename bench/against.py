"""This checkout next to an older one (DIR) on products, blocks, a training step, a layer and collectives: old time ÷ new time.

Each round starts fresh jobs of both, in the order old new, then new old, with this interpreter and its packages. A case in which
this checkout seems slower is measured again with three times the rounds before it counts.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import geometric_mean, median

from against_cases import CASES, RANKS
from common import ROOT, conclude, environment, note, options, printed, save

MEAN, SLOWEST, AGAIN = 0.98, 0.93, 3
"""The least geometric mean, the least ratio of a case, and how many times the rounds a case below it is repeated with."""
RESAMPLES, CONFIDENCE = 2000, 0.95
WORKER = Path(__file__).resolve().with_name("against_cases.py")
OLD, NEW = "old", "new"

Times = dict[str, dict[str, list[float]]]
"""Case → side → the seconds of each round."""


def main() -> None:
    """Race the two checkouts, and print the ratio of each case and whether the claims hold."""
    parser = options(__doc__, 4, "Start the jobs of each checkout this many times.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="The other checkout of summa3d: the older one.")
    parser.add_argument("--cases", help=f"Run these cases: NAME,…, of {', '.join(CASES)}. The default is all.")
    args = parser.parse_args()
    names = args.cases.split(",") if args.cases else list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if args.rounds < 1:
        parser.error("it takes at least one round")
    sides = {OLD: args.folder.resolve(), NEW: ROOT}
    for folder in sides.values():
        if not all((folder / package / "__init__.py").is_file() for package in ("summa3d", "kernels")):
            parser.error(f"{folder} is no checkout of summa3d: it has no summa3d/ and kernels/")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        paths = linked(sides, Path(scratch))
        print(f"old: {sides[OLD]} · new: {sides[NEW]} · {os.cpu_count()} cores, load {load:.1f}, {args.rounds} rounds")
        times = raced(names, args.rounds, paths)
        slow = [name for name in names if ratio(times[name]) < SLOWEST]
        if slow:
            note(f"below {SLOWEST}, measured again with {AGAIN * args.rounds} rounds: {', '.join(slow)}")
            times |= raced(slow, AGAIN * args.rounds, paths)
    print("\n".join(lines(times)))
    conclude(claims(times))
    sources = {side: str(folder) for side, folder in sides.items()}
    save({"kind": "against", **sources, "load": load, "again": slow, "seconds": times}, args.json)


def linked(sides: Mapping[str, Path], scratch: Path) -> dict[str, Path]:
    """Return for each side a folder from which `summa3d` and `summa3d.kernels` are imported: links to its own files.

    An installation maps `summa3d.kernels` to the checkout that was installed, whatever stands on PYTHONPATH.
    """
    for side, folder in sides.items():
        package = scratch / side / "summa3d"
        package.mkdir(parents=True)
        for entry in (folder / "summa3d").iterdir():
            if entry.name != "__pycache__":
                (package / entry.name).symlink_to(entry)
        (package / "kernels").symlink_to(folder / "kernels")
    return {side: scratch / side for side in sides}


def raced(names: Iterable[str], rounds: int, paths: Mapping[str, Path]) -> Times:
    """Return the seconds of the cases on both sides: of each round, from fresh jobs of one number of ranks each."""
    names = list(names)
    times: Times = {name: {side: [] for side in paths} for name in names}
    for turn in range(rounds):
        for ranks in RANKS:
            cases = [name for name in names if CASES[name].ranks == ranks]
            for side in (OLD, NEW)[:: -1 if turn % 2 else 1] if cases else ():
                for name, seconds in job(ranks, cases, paths[side]).items():
                    times[name][side].append(seconds)
    return times


def job(ranks: int, cases: Iterable[str], path: Path) -> dict[str, float]:
    """Return the seconds of the cases in one job of `ranks` ranks that imports summa3d from `path`."""
    environ = environment() | {"PYTHONPATH": str(path)}
    checkout = (path / "summa3d" / "__init__.py").resolve().parent.parent
    command = [sys.executable, "-m", "summa3d", "launch", "-n", str(ranks), str(WORKER), str(checkout), *cases]
    seconds: dict[str, float] = json.loads(printed(command, environ, path).splitlines()[-1])
    return seconds


def ratio(sides: Mapping[str, list[float]]) -> float:
    """Return the median time of the old side ÷ that of the new one: above 1, the new one is faster."""
    return median(sides[OLD]) / median(sides[NEW])


def interval(times: Times) -> tuple[float, float]:
    """Return the bootstrap interval of the geometric mean over cases: the rounds of each case are drawn again, pairs together."""
    draw, means = random.Random(1), []
    for _ in range(RESAMPLES):
        ratios = []
        for sides in times.values():
            rounds = draw.choices(range(len(sides[OLD])), k=len(sides[OLD]))
            ratios.append(ratio({side: [seconds[turn] for turn in rounds] for side, seconds in sides.items()}))
        means.append(geometric_mean(ratios))
    means.sort()
    outside = (1 - CONFIDENCE) / 2
    return means[int(outside * RESAMPLES)], means[int((1 - outside) * RESAMPLES) - 1]


def lines(times: Times) -> Iterator[str]:
    """Yield a line for each case: both medians, their ratio, and the range of the rounds' own ratios."""
    for name, sides in times.items():
        rounds = [old / new for old, new in zip(sides[OLD], sides[NEW], strict=True)]
        medians = " → ".join(f"{median(sides[side]) * 1e3:9.3f}" for side in (OLD, NEW))
        yield f"  {name:<28} {medians} ms  {ratio(sides):.3f} [{min(rounds):.3f}–{max(rounds):.3f}] of {len(rounds)} rounds"


def claims(times: Times) -> list[tuple[str, bool]]:
    """Return the claims, with what was measured, and whether they hold."""
    ratios = {name: ratio(sides) for name, sides in times.items()}
    mean, (low, high) = geometric_mean(ratios.values()), interval(times)
    slowest = min(ratios, key=ratios.__getitem__)
    return [
        (f"old ÷ new time ≥ {MEAN}, geometric mean of {len(ratios)} cases: {mean:.3f} [{low:.3f}–{high:.3f}]", mean >= MEAN),
        (f"no case below {SLOWEST}: the least is {ratios[slowest]:.3f} ({slowest})", ratios[slowest] >= SLOWEST),
    ]


if __name__ == "__main__":
    main()
