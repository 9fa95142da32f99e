"""Slurm job scripts that need no other file: header, steps, a site's settings, and what the job does."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from ..errors import ConfigError
from ..files import read_toml

HERE = Path(__file__).parent
KINDS = {
    "train": {"time": "02:00:00", "signal": "TERM@120", "requeue": ""},
    "sweep": {"array": "0-3", "time": "02:00:00", "signal": "TERM@120", "requeue": ""},
    "scaling": {"time": "00:30:00"},
}
"""What a job does → options of sbatch besides the site's."""
NODES = {("train", "cpu"): 2, ("scaling", "cpu"): 2, ("scaling", "cuda"): 4}
GRIDS = {8: "x=2,y=2,z=2", 4: "x=2,y=2,z=1", 16: "x=4,y=2,z=2"}
"""Ranks of a header → the grid that trains on them where GRID is not set."""


@dataclass(frozen=True)
class JobSite:
    """A site's settings: how its modules are loaded, its variables set, its ranks started.

    Attributes
    ----------
    device : of its ranks
    ranks, cores : of a node; of a rank (0: whatever it finds)
    header : options of sbatch
    launch : shell that sets RANKS and defines `start RANKS COMMAND…`; `like` names the site that has it
    variables : name, value and source of what its network or MPI wants
    refused : why its devices cannot be used; empty where they can
    kinds : the jobs that run there
    """

    name: str
    about: str
    device: str
    ranks: int
    modules: str
    header: tuple[str, ...] = ()
    cores: int = 0
    launch: str = ""
    like: str = ""
    environment: str = "venv"
    variables: tuple[Mapping[str, str], ...] = ()
    refused: str = ""
    notes: str = ""
    kinds: tuple[str, ...] = tuple(KINDS)

    def text(self) -> str:
        """Its part of a script."""
        launch = self.launch or site(self.like).launch
        activate = 'conda activate "${ENVIRONMENT:-summa3d}"' if self.environment == "conda" else "activate_venv"
        lines = [
            *(f"# {line}" for line in (self.about, *self.notes.strip().splitlines())),
            "set +u # files that modules and environments source may read unset variables",
            "# shellcheck disable=SC2086 # several words",
            f"load_modules ${{MODULES-{self.modules}}} # SITE: `module avail` names them; none with MODULES=",
            f"{activate} # SITE: where summa3d is installed",
            "set -u",
        ]
        if self.device == "cuda":
            lines.append("export SUMMA3D_DEVICE=cuda SUMMA3D_TRANSPORT=${SUMMA3D_TRANSPORT:-auto} # `summa3d doctor` says which")
        for variable in self.variables:
            lines += [
                f"# SITE: {variable['source']}",
                f'export {variable["name"]}="${{{variable["name"]}:-{variable["value"]}}}"',
            ]
        return "\n".join(lines) + "\n" + launch


def names() -> list[str]:
    """The sites that are known by name."""
    return sorted(file.stem for file in (HERE / "sites").glob("*.toml"))


def site(name: str) -> JobSite:
    """The site of a name, or of a TOML file. Raises ConfigError for an unknown one, and for what is no site."""
    file = Path(name) if name.endswith(".toml") else HERE / "sites" / f"{name}.toml"
    if not name.endswith(".toml") and name not in names():
        raise ConfigError(f"There is no site {name!r}. Use one of {', '.join(names())}, or a TOML file such as theirs.")
    try:
        table = read_toml(file)
        lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
        result = JobSite(**{"name": file.stem, **table, **lists})
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} describes no site: {error}.") from error
    if result.device not in ("cpu", "cuda") or result.ranks < 1 or not (result.launch or result.like):
        raise ConfigError(f"{file} describes no site: it needs a device cpu or cuda, ranks of a node, and launch or like.")
    return result


def header(of: JobSite, name: str, nodes: int, ranks: int, options: Mapping[str, str]) -> list[str]:
    """The lines of #SBATCH: nodes, ranks of a node and their cores, the site's options, and `options`; "" for no value."""
    devices = [f"gpus-per-node={ranks}"] if of.device == "cuda" else []
    tasks = [] if of.device == "cuda" and of.environment != "conda" else [f"ntasks-per-node={ranks}"]
    cores = [f"cpus-per-task={of.cores}"] if of.cores else []
    more = [f"{option}={value}" if value else option for option, value in options.items()]
    lines = [f"job-name={name}", f"nodes={nodes}", *devices, *tasks, *cores, *of.header, *more]
    return [f"#SBATCH --{line}" for line in lines]


def compose(of: JobSite, head: Sequence[str], body: str) -> str:
    """A whole script: its head, how its ranks are started on a site, and what it does."""
    said = "# Binds a rank to the cores and network card of its GPU: `record` writes it to a file."
    bind = f"{said}\nwrite_bind() {{\n    cat <<'END'\n{_read('bind.sh')}END\n}}\n"
    says, does = _parted(body)
    begins = "\n".join(["#!/bin/bash", *head, ""]) + says + "set -euo pipefail\n\n" + _read("steps.sh") + "\n"
    return begins + (bind + "\n" if of.device == "cuda" else "") + of.text() + "\n" + does


def write_all(of: JobSite) -> dict[str, str]:
    """File name → script of every kind of job that runs at a site."""
    result = {}
    for kind in of.kinds:
        nodes = NODES.get((kind, of.device), 1)
        grid = GRIDS.get(nodes * of.ranks, f"x={nodes * of.ranks},y=1,z=1")
        name = f"{of.name}_{kind}"
        default = "" if kind == "scaling" else f"GRID=${{GRID:-{grid}}}\n"
        says, does = _parted(_read(f"{kind}.sh").replace("FILE", f"{name}.sh"))
        result[f"{name}.sh"] = compose(of, header(of, name, nodes, of.ranks, KINDS[kind]), says + default + does)
    return result


def site_of(cluster: str, device: str) -> JobSite:
    """The site of a described cluster: its own, or the general one. Raises ConfigError where its devices cannot be used."""
    result = site(cluster) if cluster in names() else site(device)
    if result.refused and device == "cuda":
        raise ConfigError(result.refused)
    return result if result.device == device and "train" in result.kinds else site(device)


def assigned(**variables: object) -> str:
    """Assignments of a script, each of which the environment of sbatch overrides."""
    lines = (f"written={shlex.quote(str(value))}\n{name}=${{{name}:-$written}}\n" for name, value in variables.items())
    return "".join(lines)


def _parted(body: str) -> tuple[str, str]:
    """The comment that a body begins with, and the rest."""
    lines = body.splitlines(keepends=True)
    says = list(takewhile(lambda line: line.startswith("# "), lines))
    return "".join(says), "".join(lines[len(says) :])


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
