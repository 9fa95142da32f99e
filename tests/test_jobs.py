"""The job scripts start what they say: each is run with a launcher that only notes its line, and every line is parsed."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from summa3d.cli.main import COMMANDS
from summa3d.comm.device import select as places
from summa3d.comm.transport import select as choice
from summa3d.errors import ConfigError
from summa3d.jobs import script as jobs
from summa3d.launcher.runtime import LIKE_OPEN_MPI, loaded_runtime
from summa3d.train.config import load

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "summa3d" / "jobs"
WRITTEN = {name: text for of in jobs.names() for name, text in jobs.write_all(jobs.site(of)).items()}
SUBMITTED = ("cuda_train", "cuda_scaling", "longhorn_scaling", "cpu_train", "cpu_sweep", "cpu_scaling")
BIND = "the script that binds a rank"
HELD = "env --block-signal=TERM"
LAUNCHERS = ("srun", "ibrun")
NOTE = """#!/bin/bash
{{ printf '%q ' {name} "$@"; echo "| $SUMMA3D_DEVICE $SUMMA3D_TRANSPORT $OMP_NUM_THREADS"; }} >>"$LINES"
case " $* " in *" --check "*) echo '{{"relative_error": '"${{ERROR:-1e-15}}"'}}' ;; esac
exit "${{STATUS:-0}}"
"""
OWN = ("SLURM_", "SUMMA3D_", "OMP_", "OMPI_", "MV2_", "MPI_", "PMI", "UCX_", "CUDA_", "BIND_")
ALLOCATION = {
    "cuda": {"SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_ON_NODE": "4"},
    "longhorn": {"SLURM_JOB_NUM_NODES": "3"},
    "cpu": {"SLURM_NTASKS": "12", "SLURM_CPUS_PER_TASK": "7"},
    "frontier": {"SLURM_NTASKS": "16", "SLURM_CPUS_PER_TASK": "7"},
    "perlmutter": {"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "4"},
}


class Machine:
    """A folder of fake programs before the real ones on PATH, and what was asked of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, folder / "lines"
        (folder / "bin").mkdir()
        for name in ("srun", "ibrun", "module", "conda", "summa3d"):
            self.program(name, NOTE.format(name=name))
        (folder / "activate/bin").mkdir(parents=True)
        (folder / "activate/bin/activate").write_text('echo "activate | " >>"$LINES"\n')

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
        path = os.pathsep.join((str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
        found = {"PATH": path, "LINES": str(self.lines), **environment}
        return subprocess.run(command, cwd=self.folder, env=kept | found, capture_output=True, text=True, timeout=200)

    def submit(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NAME": script, "SLURM_JOB_ID": "17", "SLURM_LOCALID": "0"}
        job |= {"SLURM_ARRAY_TASK_ID": "2"} if script.endswith("_sweep") else {}
        job |= {**ALLOCATION[script.split("_")[0]], "VENV": f"{self.folder}/activate", **environment}
        file = self.folder / f"{script}.sh"
        file.write_text(WRITTEN[file.name])
        return self.run("bash", file, **job)

    def output(self) -> str:
        """Return what the job wrote after it had named the file of its output."""
        return "".join(file.read_text() for file in sorted(self.folder.rglob("job-17.out")))

    def asked(self) -> list[tuple[list[str], str]]:
        """Each program's line, as words, and what stood in its environment: device, transport, threads."""
        lines = [line.rpartition("|") for line in self.lines.read_text().splitlines()]
        words = [[BIND if word.endswith(".bind") else word for word in shlex.split(line)] for line, _, _ in lines]
        return list(zip(words, (environment.strip() for _, _, environment in lines), strict=True))

    def started(self, script: str, **environment: str) -> list[list[str]]:
        ended = self.submit(script, **environment)
        assert ended.returncode == 0, ended.stderr + self.output()
        return [words for words, _ in self.asked() if words[0] in LAUNCHERS]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def parsed(words: list[str]) -> argparse.Namespace:
    """The `summa3d` command within a launcher's line, as the command itself reads it."""
    name, *arguments = words[words.index("summa3d") + 1 :]
    assert name in COMMANDS
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"summa3d.cli.{name}").add_arguments(parser)
    return parser.parse_args(arguments)


def srun_gpu(ranks: int, nodes: int) -> list[str]:
    line = f"srun --nodes={nodes} --ntasks={ranks} --ntasks-per-node=4 --distribution=block --cpu-bind=none --gpu-bind=none"
    return [*line.split(), "--kill-on-bad-exit=1", BIND]


def srun_cpu() -> list[str]:
    line = "srun --ntasks=12 --cpus-per-task=7 --distribution=block:block --cpu-bind=cores --kill-on-bad-exit=1"
    return line.split()


def ibrun(ranks: int, nodes: int) -> list[str]:
    return ["ibrun", "-n", str(ranks), BIND]


FAILS = '"$@" || { status=$?; [ $status = 143 ] || echo "a rank failed: status $status"; exit $status; }'
CHECK = [
    "sh",
    "-c",
    FAILS,
    "sh",
    "summa3d",
    "gemm",
    "--m",
    "1009",
    "--n",
    "997",
    "--k",
    "1013",
    "--dtype",
    "float64",
    "--check",
    "--json",
]
GPU_LAUNCHER = {"cuda": srun_gpu, "longhorn": ibrun}


@pytest.mark.parametrize("script", WRITTEN)
def test_every_script_is_bash_and_says_what_it_is(script: str) -> None:
    assert subprocess.run(["bash", "-n"], input=WRITTEN[script], text=True, capture_output=True).returncode == 0
    lines = [line for line in WRITTEN[script].splitlines() if not line.startswith(("#!", "#SBATCH"))]
    assert all(re.match(r"# \S|#   \S", line) for line in lines[:3])
    assert all(len(line) <= 130 for line in lines)


def test_every_script_that_is_submitted_is_tested_here() -> None:
    like_others = ("frontier", "perlmutter")  # the launch of cpu and of cuda
    assert {name.removesuffix(".sh") for name in WRITTEN if not name.startswith(like_others)} == {*SUBMITTED, "cuda_sweep"}


def test_training_starts_one_rank_per_gpu_after_the_check(machine: Machine) -> None:
    shown, checked, trained = machine.started("cuda_train", GRID="x=3,y=2,z=2", CONFIG="demo")
    prefix = srun_gpu(12, 3)
    assert shown == [*prefix, "true"]
    assert checked == [*prefix, *CHECK]
    settings = "--set scheme=cuboid --set grid.x=3 --set grid.y=2 --set grid.z=2 --set train.checkpoint_every=100"
    assert trained == [*prefix, *f"{HELD} summa3d train demo --run runs/cuda_train --start-or-resume {settings}".split()]
    assert parsed(checked).check


def test_training_without_gpus_gives_each_rank_its_cores(machine: Machine) -> None:
    checked, trained = machine.started("cpu_train", GRID="x=3,y=2,z=2", RUN="runs/a", SCHEME="tesseract", CHECKPOINT_EVERY="7")
    assert checked == [*srun_cpu(), *CHECK]
    settings = "--set scheme=tesseract --set grid.x=3 --set grid.y=2 --set grid.z=2 --set train.checkpoint_every=7"
    assert trained == [*srun_cpu(), *f"{HELD} summa3d train demo --run runs/a --start-or-resume {settings}".split()]


def test_a_task_of_a_sweep_trains_in_a_folder_named_by_its_key_and_value(machine: Machine) -> None:
    trained = machine.started("cpu_sweep", VALUES="5 6 7", KEY="train.seed", SET="train.steps=9 train.warmup=1")[-1]
    settings = "--set grid.x=2 --set grid.y=2 --set grid.z=1 --set train.steps=9 --set train.warmup=1 --set train.seed=7"
    assert trained[-14:-2] == shlex.split(settings)
    assert trained[trained.index("--run") + 1] == "runs/cpu_sweep-train.seed-7"
    named = machine.started("cpu_sweep", VALUES="a b texts/c.txt", KEY="data.path", RUN="runs/texts")[-1]
    assert named[named.index("--run") + 1] == "runs/texts-data.path-texts_c.txt"
    ended = machine.submit("cpu_sweep", VALUES="5 6")
    said = "cpu_sweep: there is no value for task 2: VALUES has 2 (--array=0-1)\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", said)


STATES = "#!/bin/bash\necho ${STATE:?}\n"


@pytest.mark.parametrize(
    ("script", "status", "state", "requeued"),
    [
        *((script, 75, "RUNNING", True) for script in ("cpu_train", "cpu_sweep", "cuda_train")),
        ("cpu_train", 75, "CANCELLED", False),
        ("cpu_train", 1, "RUNNING", False),
    ],
)
def test_a_run_that_has_saved_because_it_was_asked_to_goes_back_into_the_queue(
    machine: Machine, script: str, status: int, state: str, requeued: bool
) -> None:
    ends = f'case " $* " in *" train "*) exit {status} ;; esac\n'
    for name in LAUNCHERS:
        machine.program(name, NOTE.format(name=name).replace("exit ", ends + "exit "))
    machine.program("scontrol", NOTE.format(name="scontrol"))
    machine.program("squeue", STATES)
    assert machine.submit(script, STATE=state).returncode == status
    assert [words for words, _ in machine.asked() if words[0] == "scontrol"] == [["scontrol", "requeue", "17"]] * requeued
    text = WRITTEN[f"{script}.sh"]
    assert "#SBATCH --requeue\n" in text and "#SBATCH --signal=TERM@120\n" in text


@pytest.mark.parametrize("script", ["cpu_train", "cuda_train"])
@pytest.mark.parametrize("step", ["gemm", "train"])
def test_a_job_whose_ranks_are_asked_to_end_before_they_listen_goes_back_into_the_queue(
    machine: Machine, script: str, step: str
) -> None:
    """A rank that TERM ends while Python starts leaves 143."""
    ends = f'case " $* " in *" {step} "*) exit 143 ;; esac\n'
    machine.program("srun", NOTE.format(name="srun").replace("exit ", ends + "exit "))
    machine.program("scontrol", NOTE.format(name="scontrol"))
    machine.program("squeue", STATES)
    assert machine.submit(script, STATE="RUNNING").returncode == 75
    asked = [words for words, _ in machine.asked()]
    assert asked[-1] == ["scontrol", "requeue", "17"]
    assert any("train" in words for words in asked if words[0] == "srun") is (step == "train")


def test_a_job_of_which_a_rank_fails_ends_though_term_ends_the_other_ranks(machine: Machine) -> None:
    """Else it would fail, and go back into the queue, without an end."""
    machine.program("summa3d", NOTE.format(name="summa3d").replace("exit ", 'case " $* " in *" gemm "*) exit 1 ;; esac\nexit '))
    runs = '[[ $1 == --* ]] && { shift; continue; }; "$@"; exit 143'
    machine.program("srun", f"#!/bin/bash\nwhile :; do {runs}; done\n")
    machine.program("scontrol", NOTE.format(name="scontrol"))
    machine.program("squeue", STATES)
    assert machine.submit("cpu_train", STATE="RUNNING").returncode == 143
    assert not [words for words, _ in machine.asked() if words[0] == "scontrol" or "train" in words]


def test_a_job_that_is_asked_to_end_while_it_checks_does_not_begin_to_train(machine: Machine) -> None:
    """TERM meets the script itself too where a whole job is preempted."""
    note = NOTE.format(name="summa3d").replace("#!/bin/bash\n", '#!/bin/bash\nkill -TERM "$PPID"\n')
    machine.program("summa3d", note)
    machine.program("scontrol", NOTE.format(name="scontrol"))
    machine.program("squeue", STATES)
    assert machine.submit("cpu_train", STATE="RUNNING").returncode == 75
    asked = [words for words, _ in machine.asked()]
    assert asked[-1] == ["scontrol", "requeue", "17"] and not any("train" in words for words in asked)


def test_sites_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"AMD's MI250X.*NVIDIA"):
        jobs.site_of("frontier", "cuda")
    assert jobs.site_of("frontier", "cpu").name == "frontier" and jobs.site_of("perlmutter", "cuda").name == "perlmutter"
    assert jobs.site_of("selene", "cuda").name == "cuda" and jobs.site_of("host", "cpu").name == "cpu"
    assert jobs.site("longhorn").kinds == ("scaling",) and "Volta" in WRITTEN["longhorn_scaling.sh"]
    with pytest.raises(ConfigError, match="cpu, cuda, frontier"):
        jobs.site("nowhere")
    (tmp_path / "mine.toml").write_text('about = "Mine."\ndevice = "tpu"\nranks = 1\nmodules = ""\nlike = "cpu"\n')
    with pytest.raises(ConfigError, match="device cpu or cuda"):
        jobs.site(str(tmp_path / "mine.toml"))


def test_a_run_folder_that_is_named_has_one_folder_for_each_task(machine: Machine) -> None:
    trained = machine.started("cpu_train", RUN="runs/a", SLURM_ARRAY_TASK_ID="3", SLURM_ARRAY_JOB_ID="15")[-1]
    assert trained[trained.index("--run") + 1] == "runs/a-3"


@pytest.mark.parametrize(("script", "folder"), [("cpu_train", "runs/cpu_train"), ("cuda_scaling", "runs/scaling-17")])
def test_a_job_records_script_commit_nodes_and_settings_but_no_secrets(machine: Machine, script: str, folder: str) -> None:
    secret = dict.fromkeys(("SLURM_JWT", "HF_TOKEN", "SLURM_SPANK_KEY"), "hidden-from-all")
    ended = machine.submit(script, SLURM_JOB_NODELIST="n[1-3]", SET="train.steps=9", **secret)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"output: {folder}/job-17.out\n", "")
    files = {file.suffix: file.read_text() for file in (machine.folder / folder).glob("job-17.*")}
    assert files[".sh"] == WRITTEN[f"{script}.sh"]
    assert {"SLURM_JOB_NODELIST=n[1-3]", "SET=train.steps=9"} <= {*files[".txt"].splitlines()}
    assert re.search(r"^commit=[0-9a-f]{40}(-dirty)?$", files[".txt"], re.MULTILINE)
    assert "hidden-from-all" not in "".join(files.values())


@pytest.mark.parametrize(
    ("script", "ranks"),
    [("cuda_train", 4), ("perlmutter_train", 4), ("frontier_train", 16), ("cpu_train", 8), ("cpu_sweep", 4)],
)
def test_the_grid_of_the_header_s_allocation_is_one_that_train_accepts(machine: Machine, script: str, ranks: int) -> None:
    args = parsed(machine.started(script)[-1])
    config = load(args.config, args.assignments)
    sizes = config.grid.axes
    assert sizes["x"] * sizes["y"] * sizes["z"] == ranks == ranks_of_the_header(script)
    assert args.start_or_resume and config.train.checkpoint_every == 100 and config.train.keep > 0


def ranks_of_the_header(script: str) -> int:
    header = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)$", WRITTEN[f"{script}.sh"], re.MULTILINE))
    return int(header["nodes"]) * int(header.get("gpus-per-node") or header["ntasks-per-node"])


@pytest.mark.parametrize("cluster", GPU_LAUNCHER)
def test_scaling_on_gpus_starts_each_rank_count_on_as_few_nodes_as_hold_it(machine: Machine, cluster: str) -> None:
    lines = machine.started(f"{cluster}_scaling", SIZE="1000", OUT=str(machine.folder))[2:]
    launcher = GPU_LAUNCHER[cluster]
    counts = ((1, 1), (2, 1), (4, 1), (8, 2), (12, 3))
    commands = [swept(kind, machine.folder, "float32") for kind in ("strong", "weak")]
    assert lines == [[*launcher(ranks, nodes), *command] for command in commands for ranks, nodes in counts]
    assert not any(parsed(line).fewer for line in lines)


def swept(kind: str, folder: Path, dtype: str) -> list[str]:
    """The command that measures a kind of scaling."""
    settings = f"--set ranks=1,2,4,8,12 --set m=1000 --set n=1000 --set k=1000 --set dtype={dtype}"
    return f"summa3d sweep run product-{kind} --dir {folder}/{kind} {settings}".split()


def test_scaling_without_gpus_is_one_sweep_of_each_kind_and_a_table(machine: Machine) -> None:
    from summa3d.sweep import file as sweeps
    from summa3d.sweep.points import expand

    lines = machine.started("cpu_scaling", SIZE="1000", DTYPE="float64", OUT=str(machine.folder))[1:]
    assert lines == [[*srun_cpu(), *swept(kind, machine.folder, "float64"), "--fewer"] for kind in ("strong", "weak")]
    for line in lines:
        args = parsed(line)
        points, refused = expand(sweeps.load(args.file, args.assignments))
        assert [point.ranks for point in points] == [1, 2, 4, 8, 12] and not refused and args.fewer
    reported = [words for words, _ in machine.asked() if words[:2] == ["summa3d", "report"]]
    assert [parsed(words).files for words in reported] == [[machine.folder / "strong", machine.folder / "weak"]]


@pytest.mark.parametrize("script", SUBMITTED)
def test_modules_and_doctor_come_before_the_first_rank(machine: Machine, script: str) -> None:
    machine.started(script)
    lines = [words for words, _ in machine.asked()]
    first = next(index for index, words in enumerate(lines) if words[0] in LAUNCHERS)
    assert [words[:2] for words in lines[: first - 2]] == [["module", "load"]]
    assert lines[first - 2] == (["conda", "activate", "summa3d"] if script.startswith("longhorn") else ["activate"])
    assert lines[first - 1] == ["summa3d", "doctor"]


def test_modules_can_be_left_out_and_may_not_exist(machine: Machine) -> None:
    assert machine.submit("cpu_train", MODULES="").returncode == 0
    assert "module" not in {words[0] for words, _ in machine.asked()}
    (machine.folder / "bin/module").unlink()
    ended = machine.submit("cpu_train")
    assert ended.returncode == 0
    assert ended.stderr == "no command 'module' on this machine: did not load python openmpi. MODULES= loads none.\n"


@pytest.mark.parametrize("script", ["cpu_train", "cuda_scaling"])
def test_without_venv_a_job_takes_env_and_else_the_environment_that_make_builds(machine: Machine, script: str) -> None:
    folder = machine.folder
    ended = machine.submit(script, VENV="nowhere")
    said = f"{script}: no nowhere/bin/activate in {folder}: set VENV=FOLDER, where summa3d is installed.\n"
    assert (ended.returncode, ended.stderr) == (1, said)
    assert machine.submit(script, VENV="").returncode == 0  # the summa3d on PATH
    for name in (".venv", "env"):
        (folder / name / "bin").mkdir(parents=True)
        (folder / name / "bin/activate").write_text(f'echo "activate {name} | " >>"$LINES"\n')
        assert machine.submit(script, VENV="").returncode == 0
        assert [words[1] for words, _ in machine.asked() if words[0] == "activate"][-1] == name
    assert "VENV=env" in next(folder.rglob("job-17.txt")).read_text().splitlines()


@pytest.mark.parametrize("script", ["cpu_train", "cuda_scaling"])
def test_a_check_without_a_result_says_which_option_of_srun_to_try(machine: Machine, script: str) -> None:
    kinds = "printf 'MPI plugin types are...\\n\\tnone\\n\\tpmi2\\n\\tpmix\\n'"
    machine.program("srun", f"#!/bin/bash\ncase $* in --mpi=list) {kinds} ;; *) echo 'no PMI' >&2 ;; esac\n")
    machine.program("scontrol", "#!/bin/bash\necho 'MpiDefault = none'\n")
    assert machine.submit(script).returncode != 0
    flag = "pmix" if loaded_runtime().vendor in LIKE_OPEN_MPI else "pmi2"
    said = machine.output().splitlines()[-1]
    assert said.startswith(f"the ranks computed nothing, see above. Try srun --mpi={flag} ")
    assert "srun --mpi=list: none, pmi2, pmix" in said


@pytest.mark.parametrize("script", SUBMITTED)
def test_ranks_are_told_device_transport_and_threads(machine: Machine, script: str) -> None:
    assert machine.submit(script).returncode == 0
    told = {environment for words, environment in machine.asked() if words[0] in LAUNCHERS}
    assert told == ({"7"} if script.startswith("cpu") else {"cuda auto"})


def test_a_transport_named_before_sbatch_reaches_the_ranks(machine: Machine) -> None:
    assert machine.submit("cuda_train", SUMMA3D_TRANSPORT="pinned").returncode == 0
    assert {environment for words, environment in machine.asked() if words[0] == "srun"} == {"cuda pinned"}


@pytest.mark.parametrize("script", SUBMITTED)
@pytest.mark.parametrize("trouble", [{"ERROR": "1e-3"}, {"ERROR": "NaN"}, {"ERROR": "null"}, {"STATUS": "3"}], ids=str)
def test_a_check_that_fails_ends_the_job(machine: Machine, script: str, trouble: dict[str, str]) -> None:
    assert machine.submit(script, **trouble).returncode != 0
    commands = [words[words.index("summa3d") + 1] for words, _ in machine.asked() if "summa3d" in words and words[0] in LAUNCHERS]
    assert set(commands) <= {"gemm"} and len(commands) <= 1


def test_gpus_that_were_not_asked_for_are_named(machine: Machine) -> None:
    ended = machine.submit("cuda_train", SLURM_GPUS_ON_NODE="")
    assert ended.returncode != 0
    assert "--gpus-per-node" in ended.stderr


NAMED = {places.VARIABLE: places.DEVICES, choice.VARIABLE: choice.NAMES}
SET_OR_SUPPOSED = re.compile(r"(SUMMA3D_DEVICE|SUMMA3D_TRANSPORT)(?:=(?:\$\{\w+:-)?|:-)([a-z][a-z-]*)")
COMPARED = re.compile(r"(SUMMA3D_DEVICE|SUMMA3D_TRANSPORT)[^}\s]*\} == ([a-z][a-z-]*)")


def test_every_device_and_transport_that_a_script_names_exists() -> None:
    texts = [*WRITTEN.values()]
    found = [pair for text in texts for form in (SET_OR_SUPPOSED, COMPARED) for pair in form.findall(text)]
    assert {name for _, name in found} >= {"cpu", "cuda", "auto", "cuda-aware"}
    wrong = [(variable, name) for variable, name in found if name not in NAMED[variable]]
    assert wrong == []


@pytest.mark.parametrize("script", WRITTEN)
def test_no_script_sets_a_variable_of_summa3d_that_nobody_reads(script: str) -> None:
    read = {*NAMED, *re.findall(r"SUMMA3D_[A-Z]+", "".join(path.read_text() for path in (ROOT / "summa3d").rglob("*.py")))}
    assert set(re.findall(r"SUMMA3D_[A-Z]+", WRITTEN[script])) <= read


class Node(Machine):
    """Two sockets with two GPUs and two network cards each, as /sys and nvidia-smi show them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for index in range(4):
            self.device(f"bus/pci/devices/000{index}:0a:00.0", local_cpulist=f"{40 * (index // 2)}-{40 * (index // 2) + 39}")
            self.device(f"bus/pci/devices/000{index}:0a:00.0", numa_node=str(8 * (index // 2)))
        for index, (node, state, layer) in enumerate(
            [
                (0, "4: ACTIVE", "InfiniBand"),
                (8, "4: ACTIVE", "InfiniBand"),
                (8, "1: DOWN", "InfiniBand"),
                (8, "4: ACTIVE", "Ethernet"),
            ]
        ):
            self.device(f"class/infiniband/mlx5_{index}/device", numa_node=str(node))
            self.device(f"class/infiniband/mlx5_{index}/ports/1", state=state, link_layer=layer)
        bus = """case "$*" in
            *query-gpu=index*) printf '0\\n1\\n2\\n3\\n' ;;
            *--id=[0-3]*query-gpu=pci.bus_id*) id=${1#--id=}; echo "0000000$id:0A:00.0" ;;
            *) exit 6 ;;
        esac"""
        self.program("nvidia-smi", f"#!/bin/bash\n{bus}\n")
        shown = 'echo "$2 ${UCX_NET_DEVICES-none} $CUDA_DEVICE_ORDER ${CUDA_VISIBLE_DEVICES-all} ${*:3}"'
        self.program("taskset", f"#!/bin/bash\n{shown}\n")

    def device(self, path: str, **files: str) -> None:
        place = self.folder / "sys" / path
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name).write_text(text + "\n")

    def bound(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run(FOLDER / "bind.sh", "summa3d", "doctor", BIND_SYS=f"{self.folder}/sys", **environment)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({"SLURM_LOCALID": "1"}, "0-39 mlx5_0:1 PCI_BUS_ID all"),
        ({"SLURM_LOCALID": "2"}, "40-79 mlx5_1:1 PCI_BUS_ID all"),
        ({"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, "40-79 mlx5_1:1 PCI_BUS_ID all"),
        ({"SLURM_LOCALID": "5"}, "0-39 mlx5_0:1 PCI_BUS_ID all"),
        ({"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0,2"}, "40-79 mlx5_1:1 PCI_BUS_ID 0,2"),
        ({"SLURM_LOCALID": "3", "UCX_NET_DEVICES": "mlx5_7:1"}, "40-79 mlx5_7:1 PCI_BUS_ID all"),
    ],
    ids=str,
)
def test_a_rank_runs_on_the_cores_and_network_card_of_its_gpu(node: Node, environment: dict[str, str], want: str) -> None:
    ended = node.bound(**environment)
    assert (ended.returncode, ended.stdout) == (0, f"{want} summa3d doctor\n"), ended.stderr


def test_a_rank_that_is_asked_to_end_while_it_is_bound_hears_it_later(node: Node) -> None:
    smi = (node.folder / "bin" / "nvidia-smi").read_text()
    node.program("nvidia-smi", smi.replace("#!/bin/bash\n", "#!/bin/bash\nkill -TERM $PPID\n"))
    node.program("taskset", '#!/bin/bash\nexec "${@:3}"\n')
    heard = "import signal; print(*signal.sigpending())"
    words = ["env", "--block-signal=TERM", sys.executable, "-c", heard]
    ended = node.run(FOLDER / "bind.sh", *words, BIND_SYS=f"{node.folder}/sys", SLURM_LOCALID="1")
    assert (ended.returncode, ended.stdout) == (0, "15\n"), ended.stderr


def test_a_machine_without_numa_nodes_leaves_the_network_card_to_ucx(node: Node) -> None:
    node.device("bus/pci/devices/0000:0a:00.0", numa_node="-1")
    assert node.bound(SLURM_LOCALID="0").stdout == "0-39 none PCI_BUS_ID all summa3d doctor\n"


def test_a_rank_says_what_it_got_when_asked(node: Node) -> None:
    line = node.bound(SLURM_LOCALID="3", BIND_SHOW="yes").stdout.splitlines()[0]
    assert line.endswith("rank 3: GPU 3 at 00000003:0a:00.0, cores 40-79, network mlx5_1:1")


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({}, "SLURM_LOCALID"),
        ({"SLURM_LOCALID": "0", "CUDA_VISIBLE_DEVICES": "9"}, "no GPU 9"),
        ({"SLURM_LOCALID": "0"}, "near GPU 0"),
    ],
    ids=["no-rank", "no-gpu", "no-sys"],
)
def test_a_rank_that_cannot_be_bound_fails_and_says_why(node: Node, environment: dict[str, str], named: str) -> None:
    if named.startswith("near"):
        (node.folder / "sys/bus/pci/devices/0000:0a:00.0/local_cpulist").unlink()
    ended = node.bound(**environment)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert named in ended.stderr


def test_the_scripts_pass_shellcheck_where_it_is_installed() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    for text in WRITTEN.values():
        ended = subprocess.run(["shellcheck", "--severity=warning", "-"], input=text, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout
