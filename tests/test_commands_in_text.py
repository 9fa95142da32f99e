"""Text that others have written is not run: names, limits, folders and values in job scripts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_jobs import Machine

from summa3d import cluster
from summa3d.cli.main import main as cli
from summa3d.errors import ClusterError, ConfigError
from summa3d.plan.search import export
from summa3d.sweep import file as sweeps

PLANTED = "PLANTED"
TOUCH = f"touch {PLANTED}"
HOSTILE = {
    "a line": f"x\n{TOUCH}\n",
    "a substitution": f"x$({TOUCH})`{TOUCH}`",
    "quotes": f"x';{TOUCH};'\";{TOUCH};\"",
    "the end of a parameter": f"x}};{TOUCH};{{",
    "a list of commands": f"x; {TOUCH} & {TOUCH} | {TOUCH} #",
    "blanks and patterns": f"x * {TOUCH} ? [a-z]",
}
"""What becomes a command where a script holds it as it is; each may name a folder."""
NOTE = '#!/bin/sh\nprintf "%s\\0" "$@" >>"$NOTED"\n'
"""A program that only notes its arguments."""
SWEEP = """
name = {name}
what = "gemm"
ranks = [1, 2]
limit = {limit}
base = {{m = 64, n = 64, k = 64}}
"""
SERVER = (Path(cluster.FOLDER) / "server.toml").read_text(encoding="utf-8").split('name = "server"\n', 1)[1]


def run_of(script: Path, cwd: Path, programs: Path, **environment: str) -> list[str]:
    """Return what a job script hands to the programs that only note their arguments; nothing else may come of it."""
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    noted = programs / "noted"
    slurm = {"SLURM_JOB_NAME": "own", "SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS": "2", "MODULES": ""}
    variables = {**os.environ, **slurm, "PATH": f"{programs}:{os.environ['PATH']}", "NOTED": str(noted), **environment}
    done = subprocess.run(["bash", str(script)], cwd=cwd, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [path for path in (cwd, programs) if (path / PLANTED).exists()] == []
    return noted.read_bytes().decode(errors="surrogateescape").split("\0")[:-1]


def programs_in(folder: Path, *names: str) -> Path:
    """A folder of programs that only note their arguments."""
    folder.mkdir()
    for name in names:
        (folder / name).write_text(NOTE)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("key", ["name", "limit"])
def test_a_sweep_s_name_and_limit_are_refused_where_they_are_read(
    kind: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = HOSTILE[kind].replace("x", "1", 1)  # which begins as a name and a limit may
    texts = {"name": "fine", "limit": "00:10:00", key: hostile}
    (tmp_path / "own.toml").write_text(SWEEP.format(**{name: json.dumps(text) for name, text in texts.items()}))
    assert cli(["sweep", "submit", "own.toml"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"ConfigError: {key} = {hostile!r} ") and said.err.count("\n") == 1
    assert said.out == "" and [path.name for path in tmp_path.iterdir()] == ["own.toml"]


@pytest.mark.parametrize("name", ["../out", "/out", "a/b", "..", ".", "", "-x", ".hidden", "a b", "a\0b", "a\n"])
def test_a_sweep_s_name_leads_nowhere_else(name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        sweeps.Sweep(name, ranks=(1,))


@pytest.mark.parametrize("limit", ["30", "30:00", "2:30:00", "1-12", "1-12:30", "1-12:30:00", "UNLIMITED"])
def test_every_form_of_a_time_limit_that_slurm_has_is_taken(limit: str) -> None:
    assert sweeps.Sweep("own", ranks=(1,), limit=limit).limit == limit


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_sweep_s_job_hands_on_folders_and_values_as_they_are(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs, folder, value = programs_in(tmp_path / "bin", "summa3d"), tmp_path / HOSTILE[kind].strip("/"), HOSTILE[kind]
    own = tmp_path / f"{HOSTILE[kind]}.toml"
    own.write_text(SWEEP.format(name='"fine"', limit='"10:00"'))
    assert cli(["sweep", "submit", str(own), "--dir", str(folder), "--set", f"what={'gemm'}", "--set", f"dtype={value}"]) == 0
    given = run_of(folder / "job-1.sh", tmp_path, programs)
    assert given[:5] == ["sweep", "run", str(own), "--dir", str(folder)]
    assert given[5:] == ["--set", "what=gemm", "--set", f"dtype={value}", "--ranks", "1", "--array"]
    line = subprocess.run(["bash", "-n"], input=capsys.readouterr().out, text=True, check=False)
    assert line.returncode == 0


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_planned_job_reads_the_configuration_of_its_folder(kind: str, tmp_path: Path) -> None:
    steps = 'record() { :; }; check() { :; }; train() { note "$CONFIG" "$SCHEME" "$GRID"; }; RUN=runs/a\n'
    programs, folder = programs_in(tmp_path / "bin", "note", "summa3d"), tmp_path / HOSTILE[kind]
    folder.mkdir()
    inner = SimpleNamespace(ranks=2, device="cpu", scheme="oned")
    plan = SimpleNamespace(inner=inner, stage_ranks=2, dp=1, pp=1)
    config = SimpleNamespace(train=SimpleNamespace(steps=1), grid=SimpleNamespace(axes={"y": 2, "z": 1}))
    text = export._job(folder, plan, 1.0, config, cluster.load("server"))  # type: ignore[arg-type]
    does = 'record "$RUN"\ncheck\ntrain\n'
    assert text.endswith(does)
    (folder / "job.sh").write_text(text.removesuffix(does) + steps + does)
    given = run_of(folder / "job.sh", tmp_path, programs, CONFIG="")
    assert given == [str(folder / "plan.toml"), "oned", "y=2,z=1"]


@pytest.mark.parametrize("name", [f"x\n{TOUCH}\n#", "x\r", "\x1b[2J", "x\x00", "", "x" * 101])
@pytest.mark.parametrize("of", ["the cluster", "a level"])
def test_a_cluster_and_its_levels_are_named_in_one_printable_line(name: str, of: str) -> None:
    given = f"name = {json.dumps(name)}\n"
    text = given + SERVER if of == "the cluster" else SERVER.replace('name = "network"\n', given)
    assert text != SERVER
    with pytest.raises(ClusterError, match="one line of at most 100 printable characters") as raised:
        cluster.read_text(text, "own")
    assert str(raised.value).isprintable()


def test_a_cluster_whose_name_is_a_table_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"name = \{'of': 'a table'\} is no name"):
        cluster.read_text(f"name = {{of = 'a table'}}\n{SERVER}", "own")


def test_settings_of_a_job_are_words_and_no_patterns_of_files(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (tmp_path / "data.path=a").touch()
    _, trained = machine.started("cpu_train", SET="data.path=*  train.seed=2\ntrain.steps=$(touch\tPLANTED)", GRID="x=3, y=2,z=*")
    given = [trained[place + 1] for place, word in enumerate(trained) if word == "--set"]
    assert given[:-1] == [
        *("scheme=cuboid", "grid.x=3", "grid.y=2", "grid.z=*"),
        *("data.path=*", "train.seed=2", "train.steps=$(touch", "PLANTED)"),
    ]
    assert not (tmp_path / PLANTED).exists()
