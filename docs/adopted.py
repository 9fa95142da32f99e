"""Prints docs/adopted.md: each causal language model of the installed Transformers, tried small on grids of eight ranks.

`python docs/adopted.py > docs/adopted.md` takes some minutes; a test compares the page with what is installed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
GRIDS = {"1-D": ("oned", {"y": 8}), "2-D": ("summa", {"x": 2, "y": 4}), "3-D": ("cuboid", {"x": 2, "y": 2, "z": 2})}
RANKS, ROWS = 8, 8
SIZES = {"hidden_size": 128, "intermediate_size": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8}
LAYERS = (2, 4, None)
"""Numbers of layers that are tried in turn; None, all of a configuration's own sizes, without data."""
SECONDS, BYTES = 60, 4 << 30
"""What a model may take, of time (on ranks, by each), and without data of memory beyond that of the script."""
CLOSE = 1e-9
RUNS, REFUSED, UNTRIED, WRONG = "runs", "refused", "not made", "WRONG"
NO_PLAN = "its config has no base_model_tp_plan"
Found = dict[str, Any]


def kinds() -> dict[str, bool]:
    """Each model type that Transformers has a causal language model of → whether its configuration has a plan."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return {kind: bool(getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None)) for kind in sorted(NAMES)}


# ------------------------------------------------------------------------------------------- without data, a fork for each model


def in_fork(act: Callable[[], Found]) -> Found:
    """Return what an act returns in a fork of its own, which ends in time and within its memory."""
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + BYTES,) * 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            json.dump(act(), file)
            file.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        return json.load(file) if status == 0 else {"verdict": UNTRIED, "said": "its process took too long, or too much"}


def first_line(error: Exception) -> str:
    """Return what is said of an error."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def tried_without_data(kind: str) -> Found:
    """Return whether a model is refused, or with how many layers it can be tried on ranks."""
    import adopted

    from summa3d.dry.place import DryPlace
    from summa3d.errors import ConfigError, LayoutError
    from summa3d.nn import parallelise, scheme

    said = ""
    for layers in LAYERS:
        try:
            model = adopted.without_data(kind, **({} if layers is None else {**SIZES, "num_hidden_layers": layers}))
            parallelise(model, scheme("serial", DryPlace({"y": 1})))
        except (ConfigError, LayoutError) as error:
            return {"verdict": REFUSED, "said": first_line(error)}
        except Exception as error:
            said = said or f"{type(error).__name__}: {first_line(error)}"
        else:
            return {"verdict": RUNS, "layers": layers} if layers else {"verdict": UNTRIED, "said": said}
    return {"verdict": UNTRIED, "said": said}


# ------------------------------------------------------------------------------------------------------------- on eight ranks


def on_ranks(work: Path) -> None:
    """The program of each rank: the models of a file, each in every scheme; rank 0 writes a line for each."""
    import torch
    from mpi4py import MPI

    from summa3d import Grid

    torch.set_num_threads(1)
    grids = {scheme: Grid(MPI.COMM_WORLD, axes) for scheme, (_, axes) in GRIDS.items()}
    for kind, layers in json.loads(work.read_text()):
        signal.alarm(RANKS * SECONDS)
        found = {scheme: tried(kind, layers, GRIDS[scheme][0], grid) for scheme, grid in grids.items()}
        if MPI.COMM_WORLD.rank == 0:
            with work.with_suffix(".lines").open("a") as lines:
                lines.write(json.dumps(found) + "\n")
    signal.alarm(0)


def tried(kind: str, layers: int, name: str, grid: Any) -> Found:
    """Logits, loss and gradients of a model in a scheme, beside one process. Collective."""
    import adopted

    from summa3d.errors import ConfigError, LayoutError
    from summa3d.nn import parallelise, scheme

    changed = {**SIZES, "num_hidden_layers": layers}
    ids, labels = adopted.batch(ROWS)
    try:
        wanted = adopted.alone(adopted.small(kind, **changed), ids, labels)
        model = parallelise(adopted.small(kind, **changed), context := scheme(name, grid))
        error = adopted.largest_difference(model, context, wanted, ids, labels)
    except (ConfigError, LayoutError) as refusal:
        return {"verdict": REFUSED, "said": first_line(refusal)}
    except Exception as error:  # of Transformers' code on blocks: alike on all ranks, or the job ends
        return {"verdict": WRONG, "said": f"{type(error).__name__}: {first_line(error)}"}
    error = max(grid.comm.allgather(error))
    return {"verdict": RUNS if error <= CLOSE else WRONG, "said": f"{error:.0e}"}


def launched(models: Mapping[str, int]) -> Iterator[tuple[str, dict[str, Found]]]:
    """Each model and what came of it in each scheme; a job that dies is started again behind the model at which it died."""
    left = [*models.items()]
    while left:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder) / "work"
            work.write_text(json.dumps(left))
            command = [sys.executable, "-m", "summa3d", "launch", "-n", str(RANKS), __file__, str(work)]
            done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            file = work.with_suffix(".lines")
            lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        if len(lines) < len(left):
            said = f"the job ended: {(done.stderr or done.stdout)[-200:]}"
            lines.append({scheme: {"verdict": WRONG, "said": said} for scheme in GRIDS})
        for (kind, _), line in zip(left, lines, strict=False):
            yield kind, line
        left = left[len(lines) :]


# ------------------------------------------------------------------------------------------------------------------- the page


def found_of(plans: Mapping[str, bool]) -> dict[str, dict[str, Found]]:
    """Return what came of each model in each scheme."""
    import torch
    import transformers  # noqa: F401

    import adopted  # noqa: F401 isort:skip

    torch.set_num_threads(1)
    found, models = {}, {}
    for kind in plans:
        one = in_fork(lambda kind=kind: tried_without_data(kind))
        found[kind] = dict.fromkeys(GRIDS, one)
        if one["verdict"] == RUNS:
            models[kind] = one["layers"]
    found.update(launched(models))
    return found


def page(plans: Mapping[str, bool], found: Mapping[str, dict[str, Found]], at: date) -> str:
    """The page, of what came of each model in each scheme."""
    import torch
    import transformers

    kept = [kind for kind, line in found.items() if all(one["verdict"] == RUNS for one in line.values())]
    rest = {kind: next(one for one in found[kind].values() if one["verdict"] != RUNS) for kind in found if kind not in kept}
    unplanned = [kind for kind, one in rest.items() if NO_PLAN in one["said"]]
    counts = Counter(one["verdict"] for one in rest.values())
    grids = "; ".join(f"{scheme}, {name} {describe(axes)}" for scheme, (name, axes) in GRIDS.items())
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    lines = [
        "# Transformers' causal language models, each tried",
        "",
        f"All {len(plans)} of {versions}, {at:%-d %B %Y}: small, with random weights, in float64,",
        f"[adopted](adopt.md) by their own plans on {RANKS} ranks, beside one process. `python docs/adopted.py` prints it.",
        "",
        f"**{len(kept)} run**, {counts[REFUSED]} are refused by name, {counts[UNTRIED]} not made small, {counts[WRONG]} differ;",
        f"{sum(plans.values())} have a plan of themselves. A model without one takes yours.",
        "",
        "## Those that run",
        "",
        f"The largest relative difference of logits, loss and every gradient: {grids}.",
        "",
        f"| model | {' | '.join(GRIDS)} |",
        f"|---|{'---|' * len(GRIDS)}",
        *(f"| `{kind}` | {' | '.join(one['said'] for one in found[kind].values())} |" for kind in kept),
        "",
        "## Those that do not",
        "",
        "| model | |",
        "|---|---|",
        *(f"| `{kind}` | {row(one)} |" for kind, one in rest.items() if kind not in unplanned),
        "",
        f"## Those without a plan of themselves ({len(unplanned)})",
        "",
        f"Refused: {NO_PLAN}. `parallelise` takes a plan of yours, and the probe compares: "
        f"{', '.join(f'`{kind}`' for kind in unplanned)}.",
    ]
    return "\n".join(lines) + "\n"


def describe(axes: Mapping[str, int]) -> str:
    """The axes of a grid as text."""
    return "·".join(f"{axis}={size}" for axis, size in axes.items())


def row(one: Found) -> str:
    """The verdict on a model, and what was said, in a cell of a table."""
    words = one["said"].rstrip(":. ").replace("|", "\\|").replace("*", "\\*")
    return f"{one['verdict']}: {words}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        on_ranks(Path(sys.argv[1]))
    else:
        plans = kinds()
        print(page(plans, found_of(plans), date.today()), end="")
