"""`summa3d launch` starts the ranks with the launcher of this interpreter's MPI, and a crossed launcher is refused by name."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import jobs
import pytest

from summa3d.cli import launch
from summa3d.cli import main as entry
from summa3d.comm.health.processes import launched_as
from summa3d.errors import LaunchError
from summa3d.launcher import runtime
from summa3d.launcher.runtime import (
    LIKE_OPEN_MPI,
    THREAD_VARIABLES,
    Runtime,
    find_launcher,
    launcher_vendor,
    loaded_runtime,
    rank_environment,
    usable_cores,
    vendor_of,
    version_of,
)

HYDRA = "HYDRA build details:\n    Version: 5.0.2"
OPEN_MPI = "mpirun (Open MPI) 4.1.4"
SPECTRUM = "Open MPI v10.3.1.03rtm0, package: IBM Spectrum MPI, ident: IBM Spectrum MPI, repo rev: 10.3.1.03rtm0"


def program(path: Path, says: str) -> Path:
    """An executable that answers anything with `says`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date", "mpich"),
        (HYDRA, "mpich"),
        ("Open MPI v4.1.4, package: Debian OpenMPI", "openmpi"),
        ("mpiexec (OpenRTE) 4.1.4", "openmpi"),
        ("prterun (PRRTE) 3.0", "openmpi"),
        (SPECTRUM, "spectrum"),
        ("mpirun (IBM Spectrum MPI) 10.3.1.03rtm0", "spectrum"),
        ("Intel(R) MPI Library 2021.12 for Linux* OS, based on MPICH", "intel"),
        ("slurm 22.05.8", "slurm"),
        ("something else", "unknown"),
    ],
)
def test_vendors_are_read_from_what_libraries_and_launchers_say(text: str, vendor: str) -> None:
    assert vendor_of(text) == vendor


def test_the_launcher_beside_the_library_is_taken_before_one_on_path(tmp_path: Path) -> None:
    other = program(tmp_path / "other" / "mpiexec", HYDRA)
    beside = program(tmp_path / "mpi" / "bin" / "mpiexec", HYDRA)
    (tmp_path / "mpi" / "lib" / "here").mkdir(parents=True)
    runtime = Runtime("mpich", "5.0.2", tmp_path / "mpi" / "lib" / "here" / "libmpi.so.12")
    assert find_launcher(runtime, {"PATH": str(other.parent)}).command == (str(beside),)


def test_a_launcher_of_another_mpi_is_passed_over(tmp_path: Path) -> None:
    program(tmp_path / "mpi" / "bin" / "mpiexec", HYDRA)
    right = program(tmp_path / "path" / "mpirun", OPEN_MPI)
    (tmp_path / "mpi" / "lib").mkdir()
    runtime = Runtime("openmpi", "4.1.4", tmp_path / "mpi" / "lib" / "libmpi.so.40")
    assert find_launcher(runtime, {"PATH": str(right.parent)}).command[0].endswith(("mpirun", "mpiexec"))
    assert launcher_vendor(find_launcher(runtime, {"PATH": str(right.parent)}).command) == "openmpi"


def test_no_fitting_launcher_is_an_error_that_names_those_it_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "empty"))
    wrong = program(tmp_path / "path" / "mpiexec", OPEN_MPI)
    runtime = Runtime("mpich", "5.0.2", None)
    with pytest.raises(LaunchError) as caught:
        find_launcher(runtime, {"PATH": str(wrong.parent)})
    assert "MPICH 5.0.2" in str(caught.value)
    assert f"{wrong} (Open MPI)" in str(caught.value)
    assert "SUMMA3D_MPIEXEC" in str(caught.value)


def test_the_users_choice_wins_unless_it_belongs_to_another_mpi(tmp_path: Path) -> None:
    runtime = Runtime("mpich", "5.0.2", None)
    slurm = program(tmp_path / "srun", "slurm 22.05.8")
    assert find_launcher(runtime, {"SUMMA3D_MPIEXEC": f"{slurm} --mpi=pmi2"}).command == (str(slurm), "--mpi=pmi2")
    wrong = program(tmp_path / "mpirun", OPEN_MPI)
    with pytest.raises(LaunchError, match=r"launcher of Open MPI.*loads MPICH 5\.0\.2"):
        find_launcher(runtime, {"SUMMA3D_MPIEXEC": str(wrong)})


@pytest.mark.parametrize("says", ["mpirun (IBM Spectrum MPI) 10.3.1.03rtm0", None], ids=["mpirun", "jsrun"])
def test_spectrum_mpi_is_started_by_its_own_mpirun_or_jsrun(tmp_path: Path, says: str | None) -> None:
    home = tmp_path / "spectrum_mpi"
    program(tmp_path / "path" / "mpirun", OPEN_MPI)
    own = program(home / "bin/mpirun", says) if says else program(home / "jsm_pmix/bin/jsrun", "10.03.01")
    runtime = Runtime(vendor_of(SPECTRUM), version_of(SPECTRUM), home / "lib" / "libmpi_ibm.so.3")
    assert runtime.name == "IBM Spectrum MPI 10.3.1.03rtm0"
    assert find_launcher(runtime, {"PATH": str(tmp_path / "path")}).command == (str(own),)
    own.unlink()
    with pytest.raises(LaunchError, match=r"(?s)belongs to IBM Spectrum MPI 10.*mpirun \(Open MPI\)"):
        find_launcher(runtime, {"PATH": str(tmp_path / "path")})


def test_the_library_of_spectrum_mpi_is_found_among_the_files_that_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        "/usr/lib/libc.so.6",
        "/opt/ibm/spectrum_mpi/lib/libmpiprofilesupport.so.3",
        "/opt/ibm/spectrum_mpi/lib/libmpi_ibm.so.3",
    ]
    answer = subprocess.CompletedProcess([], 0, json.dumps({"version": SPECTRUM, "files": files}), "")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: answer)
    assert loaded_runtime() == Runtime("spectrum", "10.3.1.03rtm0", Path(files[2]))


def test_what_jsrun_and_spectrums_mpirun_started_is_known_by_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    jsrun = {"JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3"}
    assert launched_as(jsrun) == (8, 3, "jsrun (IBM Spectrum MPI)")
    for name in jsrun:
        monkeypatch.setenv(name, jsrun[name])
    entry._check_launcher(SPECTRUM, size=None)
    entry._check_launcher(SPECTRUM, size=8)
    with pytest.raises(LaunchError, match=r"jsrun \(IBM Spectrum MPI\) started 8 processes.*MPICH 5\.0\.2"):
        entry._check_launcher("MPICH Version:      5.0.2", size=None)


@pytest.mark.parametrize("vendor", ["mpich", "openmpi", "spectrum"])
def test_ranks_share_the_cores_and_yield_only_where_they_outnumber_them(vendor: str) -> None:
    crowded, words = rank_environment(vendor, ranks=8, cores=2, environ={})
    roomy, _ = rank_environment(vendor, ranks=2, cores=8, environ={})
    waiting = {"mpich": "MPIR_CVAR_POLLS_BEFORE_YIELD", "openmpi": "OMPI_MCA_mpi_yield_when_idle"}.get(
        vendor, "OMPI_MCA_mpi_yield_when_idle"
    )
    assert all(crowded[name] == "1" and roomy[name] == "4" for name in THREAD_VARIABLES)
    assert waiting in crowded and waiting not in roomy
    assert words == "1 BLAS thread per rank, ranks that wait in MPI yield"


def test_what_the_user_has_set_stays() -> None:
    mine = {"OMP_NUM_THREADS": "3", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
    assert rank_environment("mpich", ranks=8, cores=2, environ=mine) == ({}, "")


@pytest.mark.parametrize(("used", "tried"), [("none", "pmi2"), ("pmi2", "pmix")])
def test_ranks_that_srun_started_alone_are_told_its_option(monkeypatch: pytest.MonkeyPatch, used: str, tried: str) -> None:
    variables = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3", "PMI_SIZE": "8", "PMI_RANK": "3", "SLURM_MPI_TYPE": used}
    for name in variables:
        monkeypatch.setenv(name, variables[name])
    with pytest.raises(LaunchError, match=rf"^srun started 8 processes.*MPICH 5\.0\.2,\n.*Try srun --mpi={tried} "):
        entry._check_launcher("MPICH Version:      5.0.2", size=1)


def test_a_serial_process_inside_a_slurm_allocation_was_not_launched() -> None:
    assert launched_as({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None
    assert launched_as({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}) == (8, 3, "srun")
    assert launched_as({"PMI_SIZE": "4", "PMI_RANK": "1"}) is not None
    assert launched_as({}) is None


def test_launch_runs_the_command_on_every_rank_and_says_how_in_one_line() -> None:
    product = ["gemm", "--m", "33", "--n", "20", "--k", "17", "--grid", "x=2,y=2,z=2", "--json"]
    ended = jobs.run_serial(["-m", "summa3d", "launch", "-n", "8", *product])
    assert ended.status == 0, ended.stderr
    assert ended.stdout.count("\n") == 1 and '"grid"' in ended.stdout
    lines = ended.stderr.splitlines()
    assert [line for line in lines if line.startswith("summa3d launch: 8 ranks on ")] == lines, ended.stderr
    assert loaded_runtime().name in lines[0]


def test_bad_arguments_are_told_once_by_all_ranks_together() -> None:
    ended = jobs.run_serial(["-m", "summa3d", "launch", "-n", "4", "gemm", "--bogus"])
    assert ended.status == entry.USAGE_STATUS
    assert ended.stderr.count("see summa3d help gemm") == 1, ended.stderr


def test_a_switch_of_the_environment_that_says_neither_yes_nor_no_is_one_message() -> None:
    product = ["gemm", "--m", "8", "--n", "8", "--k", "8"]
    for variable in ("SUMMA3D_BIND", "SUMMA3D_NODE_MEMORY", "SUMMA3D_UNLINK"):
        ended = jobs.run_serial(["-m", "summa3d", "launch", "-n", "2", *product], extra={variable: "off"})
        assert ended.status == 1 and "Traceback" not in ended.stderr
        assert ended.stderr.count(f"ConfigError: {variable} is 'off'; it takes yes or no.") == 1, ended.stderr


def test_launch_without_a_command_is_an_error_with_an_example() -> None:
    ended = jobs.run_serial(["-m", "summa3d", "launch", "-n", "4"])
    assert ended.status == 1
    assert ended.stderr.startswith("LaunchError: ") and "for example" in ended.stderr.lower()
    assert "Traceback" not in ended.stderr


def test_several_launched_but_a_world_of_one_is_an_error_that_names_both() -> None:
    """A launcher of another MPI, as its variables show it: this process is one of 8, but MPI sees a single rank."""
    vendor = loaded_runtime().vendor
    name = "PMI" if vendor in LIKE_OPEN_MPI else "OMPI_COMM_WORLD"
    crossed = {f"{name}_SIZE": "8", f"{name}_RANK": "0"}
    arguments = ["-m", "summa3d", "gemm", "--m", "8", "--n", "8", "--k", "8", "--grid", "x=1,y=1,z=1"]
    ended = jobs.run_serial(arguments, extra=crossed)
    assert ended.status == 1
    assert ended.stderr.startswith("LaunchError: "), ended.stderr
    assert loaded_runtime().name in ended.stderr
    assert ("PMI launcher" if vendor in LIKE_OPEN_MPI else "Open MPI's or Spectrum MPI's launcher") in ended.stderr
    assert "Traceback" not in ended.stderr
    other = jobs.run_serial(arguments, extra={**crossed, f"{name}_RANK": "1"})
    assert other.status == 1 and other.stderr == ""


def test_asking_for_the_library_leaves_this_process_without_mpi() -> None:
    program = (
        "import sys; from summa3d.launcher.runtime import loaded_runtime; loaded_runtime(); print('mpi4py.MPI' in sys.modules)"
    )
    assert jobs.run_serial(["-c", program], fresh=True).stdout.strip() == "False"


@pytest.mark.parametrize(("word", "nearest"), [("gem", "gemm"), ("trian", "train")])
def test_an_unknown_command_names_the_nearest(word: str, nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([word]) == entry.USAGE_STATUS
    assert f"did you mean {nearest!r}?" in capsys.readouterr().err


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--help"]) == 0
    listing = capsys.readouterr().out
    assert all(f"  {command} " in listing for command in entry.COMMANDS)


PROGRAM = """
import os, sys
from mpi4py import MPI
cores = sorted(os.sched_getaffinity(0))
found = MPI.COMM_WORLD.gather((len(cores), os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"], sys.argv[1:], __name__))
if MPI.COMM_WORLD.rank == 0:
    print(found)
    raise RuntimeError("only rank 0")
MPI.COMM_WORLD.Barrier()
"""


def test_a_script_and_a_module_run_on_every_rank_on_cores_of_their_own_and_end_with_an_exception(tmp_path: Path) -> None:
    """The other ranks wait in a barrier for one that has raised."""
    (tmp_path / "prog.py").write_text(PROGRAM)
    ranks = usable_cores() + 1
    cores = 1 if usable_cores() > 1 and hasattr(os, "sched_setaffinity") else usable_cores()
    for words in (["prog.py", "-n", "5"], ["-m", "prog", "-n", "5"]):
        ended = jobs.run_serial(["-m", "summa3d", "launch", "-n", str(ranks), *words], cwd=tmp_path)
        assert ended.status != 0 and ended.stderr.count("RuntimeError: only rank 0") == 1, ended.stderr
        assert f"uncaught exception on rank 0 of {ranks}:\nTraceback" in ended.stderr and "ended first" not in ended.stderr
        assert ended.stdout.strip() == str([(cores, "1", "PASSIVE", ["-n", "5"], "__main__")] * ranks)


def test_what_is_neither_a_command_nor_a_script_is_refused_before_the_launcher_starts() -> None:
    ended = jobs.run_serial(["-m", "summa3d", "launch", "-n", "2", "trian", "demo"])
    assert ended.status == 1
    assert ended.stderr == "LaunchError: there is no command 'trian'; did you mean 'train'? Nor is there a script of this path.\n"


def test_a_python_before_the_script_and_a_program_that_is_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "prog").write_bytes(b"\x7fELF\0")
    said = {
        ("python", "mine.py"): "on every rank: name the script alone, mine.py.",
        (sys.executable, "mine.py", "4"): "name the script alone, mine.py.",
        (str(tmp_path / "prog"),): "is no Python script: it has bytes that are no text. mpiexec starts other programs.",
    }
    for words, message in said.items():
        ended = jobs.run_serial(["-m", "summa3d", "launch", "-n", "2", *words])
        assert ended.status == 1 and ended.stderr.startswith("LaunchError: ") and ended.stderr.endswith(message + "\n"), ended


@pytest.mark.skipif(usable_cores() < 2 or not hasattr(os, "sched_setaffinity"), reason="needs two cores")
def test_a_rank_of_a_pipeline_leaves_the_core_that_it_took() -> None:
    code = (
        "from summa3d.launcher.runtime import leave_core, take_core\nfrom summa3d.node_support import affinity\n"
        "for act in (leave_core, lambda: take_core(1), leave_core):\n    act()\n    print(*affinity())"
    )
    first, bound, free = jobs.run_serial(["-c", code]).stdout.splitlines()
    assert first == free and bound == first.split()[1]


def test_threads_that_the_user_has_set_stay_and_others_are_shared_and_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*THREAD_VARIABLES, *runtime.SPIN_VARIABLES, runtime.SHARE_VARIABLE):
        monkeypatch.setenv(name, "")  # so that what is set here ends with the test
        monkeypatch.delenv(name)
    assert runtime.threads_are_free()
    runtime.share_threads(4)
    assert runtime.threads_are_free() and {os.environ[name] for name in THREAD_VARIABLES} == {"4"}
    runtime.share_threads(1)  # what summa3d has set, it may lower
    assert {os.environ[name] for name in THREAD_VARIABLES} == {"1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    runtime.share_threads(2)
    assert not runtime.threads_are_free() and os.environ["OMP_NUM_THREADS"] == "3"
    runtime.let_idle_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "100")
    runtime.let_idle_threads_sleep()
    assert "OMP_WAIT_POLICY" not in os.environ


def test_a_process_that_holds_mpi_itself_such_as_a_notebook_can_launch_ranks(tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text(
        "import sys\nfrom mpi4py import MPI\nsys.stdout.write(f'{MPI.COMM_WORLD.allreduce(1)}\\n')\n"
    )
    inner = [sys.executable, "-m", "summa3d", "launch", "-n", "2", "prog.py"]
    program = (
        "from mpi4py import MPI; import subprocess; from summa3d import Grid; grid = Grid(MPI.COMM_WORLD, {'x': 1});"
        f"print(grid.size, subprocess.run({inner!r}, capture_output=True, text=True, timeout=200).stdout.split())"
    )
    ended = jobs.run_serial(["-c", program], cwd=tmp_path, fresh=True)
    assert ended.stdout == "1 ['2', '2']\n", ended.stderr


def test_nothing_is_imported_from_the_current_folder_but_by_ones_own_script(tmp_path: Path) -> None:
    """A run folder that somebody else wrote may hold a json.py."""
    for name in ("json", "tomllib", "random", "mpi4py", "numpy"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r}); raise SystemExit('planted')\n"
        )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "beside.py").write_text("WORD = 'found'\n")
    (tmp_path / "mine" / "script.py").write_text(
        "import beside\nfrom mpi4py import MPI\nprint(MPI.COMM_WORLD.gather(beside.WORD))\n"
    )
    program = str(Path(sys.executable).with_name("summa3d"))
    product = ["launch", "-n", "2", "gemm", "--m", "8", "--n", "8", "--k", "8", "--check"]
    for words, said in ((product, "error"), (["doctor"], "MPI"), (["launch", "-n", "2", "mine/script.py"], "['found', 'found']")):
        done = subprocess.run(
            [program, *words], cwd=tmp_path, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0 and said in done.stdout, (words, done)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


SHOWS_BLOCKED = "import re; print(re.search('SigBlk:.(.*)', open('/proc/self/status').read())[1])"


def test_ranks_of_train_hold_sigterm_back_from_before_python_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher passes it on at once: a rank that had not blocked it yet died, and the run was not started again."""
    commands = []
    monkeypatch.setattr(launch, "follow", lambda command, environment: commands.append(command) or 0)
    for words in (["train", "demo"], ["--", "train", "demo"], ["gemm", "--m", "8", "--n", "8", "--k", "8"], ["doctor"]):
        entry.main(["launch", "-n", "2", *words])
    rank = [command[command.index("2") + 1 :][: len(launch.HOLD) + 1] for command in commands]
    assert rank[:2] == [[*launch.HOLD, sys.executable]] * 2 and [words[0] for words in rank[2:]] == [sys.executable] * 2
    held = subprocess.run([*rank[0], "-c", SHOWS_BLOCKED], capture_output=True, text=True, timeout=60).stdout
    assert int(held, 16) & 1 << (signal.SIGTERM - 1)


def test_where_env_cannot_block_signals_ranks_start_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path / "env", "").write_text("#!/bin/sh\nexit 125\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["mpiexec", "-n", "2", sys.executable, "-m", "summa3d"]
    assert launch.holding(command) == command
