"""What programs take from the command line and read from its JSON: options, helps and keys, as golden_fields.json has them.

`PYTHONPATH=tests python tests/cli/test_golden_fields.py` writes the file again. Values are left out: they are tested elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import small_runs

from summa3d.bench import fitted
from summa3d.cli import main as entry
from summa3d.cli.plan import MovedOption

FILE = Path(__file__).with_name("golden_fields.json")
PRODUCT = ("--m", 16, "--n", 12, "--k", 8)
ON = ("--cluster", "host")
ONE_PLAN = ("--era", 2021, "--ranks", 2, "--fix", "pp=2")
PLAN = ("plan", "--model", "gpt2-small", "--cluster", "dgx-h100", "--batch", 8, *ONE_PLAN, "--json")
SWEEPS = {
    "gemm": "base = {m = 16, n = 12, k = 8}\nvary.algorithm = ['cuboid', 'summa']",
    "block": (
        "base = {model = {hidden = 24, heads = 6, sequence = 8, layers = 1}, train.batch = 4, grid = 'fewest'}\n"
        "vary.scheme = ['oned', 'cuboid']\npublished = 'points.toml'"
    ),
}


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    """Yield the options of a parser and of its subcommands, and what a user reads of them."""
    of = []
    for action in parser._actions:
        if isinstance(action, MovedOption):
            continue
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from options(one)
        names = " ".join(action.option_strings) or f"{action.metavar or action.dest}"
        facts = {"metavar": action.metavar, "nargs": action.nargs, "choices": action.choices and list(action.choices)}
        default = None if action.default == argparse.SUPPRESS else action.default
        of.append([names, str(default), action.required, {key: fact for key, fact in facts.items() if fact}, action.help])
    yield parser.prog, {"description": parser.description, "options": of}


def fields(value: Any, at: str = "") -> Iterator[str]:
    """Yield the paths of all keys but sentences; elements of a list are alike."""
    if isinstance(value, dict):
        for key, one in value.items():
            if " " not in key:
                yield f"{at}.{key}".lstrip(".")
                yield from fields(one, f"{at}.{key}")
    elif isinstance(value, list):
        for one in value:
            yield from fields(one, f"{at}[]")


def printed(*words: object) -> str:
    """Return what a command prints that needs no ranks."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        assert entry.main([*map(str, words)]) == 0
    return out.getvalue()


def on_ranks(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what commands print on two ranks, one after the other in one job, and the lines of sweeps."""
    settings = small_runs.assignments(small_runs.write_corpus(folder / "corpus.txt"), grid__y=2, train__steps=2)
    sizes = ("--hidden", 24, "--heads", 6, "--sequence", 8, "--batch", 4)
    (folder / "points.toml").write_text('source = "there"\nseries.oned = [[1, 1.0], [2, 1.5]]\n')
    for what, text in SWEEPS.items():
        shape = f"kind = 'strong'\nwhat = '{what}'\nranks = [2]\nrounds = 1\ncluster = 'host'\n"
        (folder / f"{what}.toml").write_text(shape + text)
    race = ("--rounds", 1, *ON, "--json", "-")
    lines: dict[str, tuple[object, ...]] = {
        "gemm": ("gemm", *PRODUCT, "--check", "--repeat", 1, "--json"),
        **{f"bench {kind}": ("bench", kind, *PRODUCT, "--numpy", 1, *race) for kind in ("gemm", "strong", "weak")},
        "bench block": ("bench", "block", "--scheme", "oned", "--regather", "both", *sizes, *race),
        "train": ("train", "demo", "--run", folder / "run", "--json", *(word for one in settings for word in ("--set", one))),
        **{f"sweep {what}": ("sweep", "run", folder / f"{what}.toml", "--dir", folder / what) for what in SWEEPS},
    }
    for name, done in zip(lines, jobs.commands([*lines.values()], 2), strict=True):
        assert done.status == 0, (name, done.stderr)
        yield name, done.stdout
    for what in SWEEPS:
        yield f"sweep {what}", "\n".join(file.read_text() for file in (folder / what).rglob("points.jsonl"))


def calibrated() -> dict[str, Any]:
    """Return the result of a calibration whose times are made up."""
    sides, time = (64, 128, 256), fitted.MeasuredTime
    products = [time("product", f"{side}³", 1e-9 * side**3, "float32", side, side, side) for side in sides]
    elements = [time("elements", f"{side}", 1e-9 * side, bytes=side) for side in sides]
    moves = [time("move", f"{side}", 1e-8 * side, bytes=side, level="node", hops=1) for side in sides]
    samples = (*products, *elements, *moves, time("layers", "a block", 1e-3, products=12, kernels=30))
    return fitted.as_result(fitted.Measured(2, 1, 2, 1e9, True, samples), fitted.fit(samples), {})


def found(folder: Path) -> dict[str, Any]:
    """Return all options and keys as they are now."""
    said = dict(on_ranks(folder))
    said |= {"plan": printed(*PLAN), "doctor": printed("doctor", "--json")}
    said["bench calibrate"] = json.dumps(calibrated())
    keys = {
        name: sorted({path for line in text.splitlines() for path in fields(json.loads(line))}) for name, text in said.items()
    }
    for what in SWEEPS:
        printed("sweep", "report", folder / what, "--format", "csv", "--no-plots", "--out", folder)
        (table,) = folder.glob("*.csv")
        keys[f"sweep report {what}, CSV"] = table.read_text().splitlines()[0].split(",")
        table.unlink()
        printed("sweep", "collect", folder / what, "--csv", "-o", folder / "lines.csv")
        keys[f"sweep collect {what}, CSV"] = (folder / "lines.csv").read_text().splitlines()[0].split(",")
        (folder / "lines.csv").unlink()
    return {"keys": keys, "options": dict(one for name in entry.COMMANDS for one in options(entry.parser_of(name)))}


def test_no_option_and_no_key_is_lost(tmp_path: Path) -> None:
    """New ones are none of its business: they are in the file once it is written again."""
    now, golden = json.loads(json.dumps(found(tmp_path))), json.loads(FILE.read_text(encoding="utf-8"))
    for name, keys in golden["keys"].items():
        assert [key for key in keys if key not in now["keys"][name]] == [], name
    for name, facts in golden["options"].items():
        assert [one for one in facts["options"] if one not in now["options"][name]["options"]] == [], name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        FILE.write_text(json.dumps(found(Path(scratch)), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
