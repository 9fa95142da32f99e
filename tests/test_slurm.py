"""The CPU job scripts on a real Slurm of four nodes, all on this machine: submitted, stopped by the time limit, continued."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jobs
import local_slurm
import pytest
from small_runs import SMALL, write_corpus

from summa3d.jobs.script import site, write_all
from summa3d.launcher.runtime import loaded_runtime
from summa3d.launcher.slurm import STARTING

ROOT = Path(__file__).parent.parent
REASON = local_slurm.why_not()
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
WAIT = 300.0  # seconds for a job, on two cores that may have other work
ENDLESS = 100_000  # steps
PATIENCE = 30  # seconds of a rank's silence that end a job; starts of other ranks take many under load
TYPE = {"SLURM_MPI_TYPE": STARTING["mpich" if REASON is not None else loaded_runtime().vendor][0]}  # what starts the ranks
# Ranks that outnumber the cores must not spin.
COMMON = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "PYTHONPATH": str(ROOT)}
SMALLER = ("--cpus-per-task=1",)
ONE_NODE, TWO_NODES = ("--nodes=1", "--ntasks-per-node=1"), ("--nodes=2", "--ntasks-per-node=1")


@dataclass
class Cluster:
    """A Slurm, a folder that jobs run in, and the jobs that were submitted when it started.

    The folder's environments: `env` starts a Python for each program, `warm` forks one that has imported torch.
    """

    slurm: local_slurm.LocalSlurm
    folder: Path
    jobs: dict[str, str]

    def submit(self, script: str, *options: str, **environment: str) -> str:
        """Submit a script of `summa3d jobs`, or a file; returns the job's number."""
        command = [
            "sbatch",
            "--parsable",
            f"--chdir={self.folder}",
            *SMALLER,
            *options,
            script if script.endswith(".sh") else str(self.written(script)),
        ]
        variables = {**COMMON, "VENV": str(self.folder / "env"), **environment}
        return self.slurm.run(*command, cwd=ROOT, **variables).stdout.strip()

    def written(self, script: str) -> Path:
        """The script of jobs/ of this name, written into the folder."""
        file = self.folder / f"{script}.sh"
        file.write_text(write_all(site(script.split("_")[0]))[file.name])
        return file

    def ends(self, name: str) -> str:
        return self.slurm.wait(self.jobs[name], WAIT)

    def output(self, folder: str, job: str) -> str:
        return (self.folder / folder / f"job-{job}.out").read_text()

    def told(self, folder: str, job: str) -> str:
        """Output of the job, Slurm and its daemons: Slurm may write to the script's own output, or to that of the run."""
        outputs = "".join(file.read_text() for file in self.folder.glob(f"slurm-{job}.out"))
        return f"{outputs}\n{self.output(folder, job)}\n{self.slurm.facts(job)}\n{self.slurm.logs()}"

    def configure(self, name: str, steps: int) -> str:
        """Write a configuration file of the small run; returns its name."""
        settings = {
            **SMALL,
            "data.path": str(self.folder / "corpus.txt"),
            "train.steps": steps,
            "train.evaluate_every": 0,
            "device": "cpu",
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        (self.folder / name).write_text("\n".join(lines) + "\n")
        return name

    def ask(self, run: str, *options: str) -> str:
        """Submit a run without an end, with checkpoints so rare that none is due; returns the job's number."""
        config = self.configure(f"{Path(run).name}.toml", steps=ENDLESS)
        settings = {"CONFIG": config, "GRID": "x=2", "RUN": run, "MODULES": "", "CHECKPOINT_EVERY": str(ENDLESS)}
        return self.submit("cpu_train", *TWO_NODES, *options, **TYPE, **settings)

    def until(self, happens: Callable[[], bool], run: str, job: str) -> None:
        """Wait until something of a job happens."""
        deadline = time.monotonic() + WAIT
        while not happens():
            assert time.monotonic() < deadline, self.told(run, job)
            time.sleep(0.3)

    def trained(self, run: str, job: str) -> None:
        """Wait until a run has taken some steps."""
        file = self.folder / run / "metrics.jsonl"
        self.until(lambda: file.exists() and len(file.read_text().splitlines()) > 3, run, job)

    def goes_on(self, run: str, job: str, steps: int) -> None:
        """Wait until a job is in the queue again, and let its run end after so many steps."""
        self.until(lambda: self.slurm.facts(job).get("Restarts") == "1", run, job)
        self.configure(f"{Path(run).name}.toml", steps)
        self.until(lambda: self.slurm.facts(job)["JobState"] == "PENDING", run, job)
        time.sleep(2)  # a slurmd refuses a job that starts again in the second in which it ended: "credential revoked"
        self.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # a job that was requeued waits for two minutes
        assert self.slurm.wait(job, WAIT) == "COMPLETED", self.told(run, job)
        assert [line["step"] for line in self.metrics(run)] == [*range(1, steps + 1)]

    def saved(self, run: str, job: str) -> int:
        """After which step a run was saved that was asked to end."""
        output = " ".join(self.output(run, job).split())
        found = re.search(rf"got SIGTERM: saved after step (\d+) of {ENDLESS}; exit status 75", output)
        assert found is not None, self.told(run, job)
        return int(found[1])

    def metrics(self, run: str) -> list[dict[str, object]]:
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def planned(cluster: Cluster) -> str:
    """The job of a plan of the small run for two ranks of one node."""
    file, folder = cluster.folder / cluster.configure("small.toml", steps=2), cluster.folder / "planned"
    words = (
        f"plan --model {file} --cluster server --ranks 2 --batch 12 --fix scheme=oned-sp --fix recompute=none --write {folder}"
    )
    environ = {**os.environ, "SUMMA3D_CACHE": str(cluster.folder / "cells")}
    subprocess.run([sys.executable, "-m", "summa3d", *words.split()], cwd=ROOT, env=environ, capture_output=True, check=True)
    return str(folder / "job.sh")


def environment_of(folder: Path, warm: bool = False) -> Path:
    """Make an environment whose programs are this Python's.

    warm : forks, where there are any: no signal may meet them, and no two find each other from node to node.
    """
    forked = warm and jobs.python() != sys.executable
    programs = {"python": 'exec {} "$@"', "summa3d": 'exec {} -m summa3d "$@"'} if forked else {}
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/activate").write_text(f'export PATH="{folder}/bin:{Path(sys.executable).parent}:$PATH"\n')
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text.format(jobs.python())}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The Slurm with the jobs of the default run submitted: two at a time, each on two nodes, run while tests wait for one."""
    folder = tmp_path_factory.mktemp("jobs")
    slurm = local_slurm.LocalSlurm()
    try:
        found = Cluster(slurm, folder, {})
        environment_of(folder / "env")
        write_corpus(folder / "corpus.txt")
        found.jobs["mismatched"] = found.submit("cpu_train", *TWO_NODES)
        found.jobs["scaling"] = found.submit("cpu_scaling", *TWO_NODES, SIZE="96", **TYPE)
        warm = str(environment_of(folder / "warm", warm=True))
        swept = {"CONFIG": found.configure("swept.toml", steps=2), "GRID": "x=1", "VALUES": "1e-3 5e-3", "MODULES": ""}
        found.jobs["sweep"] = found.submit("cpu_sweep", *ONE_NODE, "--array=0-1", **TYPE, **swept, VENV=warm)
        yield found
    finally:
        slurm.stop()


@pytest.mark.wide
def test_a_job_that_is_asked_to_end_saves_and_runs_again(cluster: Cluster) -> None:
    run, job = "runs/asked", cluster.ask("runs/asked")
    cluster.trained(run, job)
    cluster.slurm.run("scancel", "--signal=TERM", job)
    cluster.until(lambda: "the run has saved: requeued" in cluster.output(run, job), run, job)
    saved = cluster.saved(run, job)
    cluster.goes_on(run, job, saved + 5)
    assert f"resumed after step {saved}" in " ".join(cluster.output(run, job).split())


@pytest.mark.wide
def test_a_job_that_is_asked_to_end_before_its_ranks_listen_runs_again(cluster: Cluster) -> None:
    run, job = "runs/early", cluster.ask("runs/early")
    steps = ("squeue", "--steps", "-h", "-o", "%i")
    cluster.until(lambda: f"{job}.1" in cluster.slurm.run(*steps).stdout.split(), run, job)  # that of the check is job.0
    cluster.slurm.run("scancel", "--signal=TERM", job)
    cluster.goes_on(run, job, 5)


@pytest.mark.wide
def test_a_job_that_another_preempts_saves_and_goes_on(cluster: Cluster) -> None:
    run, job = "runs/preempted", cluster.ask("runs/preempted", "--exclusive")  # no other job is preempted with it
    cluster.trained(run, job)
    theirs = ("--partition=urgent", "--exclusive", f"--nodelist={cluster.slurm.facts(job)['NodeList']}")
    urgent = cluster.slurm.run("sbatch", "--parsable", f"--chdir={cluster.folder}", "--nodes=2", *theirs, "--wrap=true")
    assert cluster.slurm.wait(urgent.stdout.strip(), WAIT) == "COMPLETED", cluster.told(run, job)
    saved = cluster.saved(run, job)
    cluster.goes_on(run, job, saved + 5)
    assert f"resumed after step {saved}" in " ".join(cluster.output(run, job).split())


@pytest.mark.wide
def test_a_run_stopped_by_its_time_limit_is_continued_by_the_job_that_depends_on_it(cluster: Cluster) -> None:
    run = cluster.folder / "runs/long"
    endless = {"CONFIG": cluster.configure("endless.toml", steps=ENDLESS), "GRID": "x=2", "RUN": "runs/long", "MODULES": ""}
    first = cluster.submit("cpu_train", *TWO_NODES, **TYPE, **endless)
    later = (*TWO_NODES, "--hold", f"--dependency=afternotok:{first}", "--kill-on-invalid-dep=yes")
    second = cluster.submit("cpu_train", *later, **TYPE, **endless | {"CONFIG": "rest.toml", "GRID": "y=2"})
    cluster.trained("runs/long", first)
    cluster.slurm.run("scontrol", "update", f"JobId={first}", "EndTime=now+1seconds")  # time limits count whole minutes
    assert cluster.slurm.wait(first, WAIT) == "TIMEOUT"
    assert "DUE TO TIME LIMIT" in cluster.told("runs/long", first)
    newest = max(int(folder.name.removeprefix("step-")) for folder in run.glob("checkpoints/step-*"))
    cluster.configure("rest.toml", steps=newest + 5)
    cluster.slurm.run("scontrol", "release", second)
    assert cluster.slurm.wait(second, WAIT) == "COMPLETED", cluster.output("runs/long", second)
    assert f"after step {newest}" in cluster.output("runs/long", second)
    assert [line["step"] for line in cluster.metrics("runs/long")] == [*range(1, newest + 6)]


def test_ranks_that_srun_started_alone_end_the_job_in_a_line_that_names_the_option_to_try(cluster: Cluster) -> None:
    assert cluster.ends("mismatched") == "FAILED"
    lines = cluster.output("runs/cpu_train", cluster.jobs["mismatched"]).splitlines()
    kind = TYPE["SLURM_MPI_TYPE"]
    assert lines[-1].startswith(f"the ranks computed nothing, see above. Try srun --mpi={kind} (SLURM_MPI_TYPE={kind} ")
    assert [line for line in lines if line.startswith("warning: without --mpi, srun starts ranks by none")]
    assert not (cluster.folder / "runs/cpu_train/checkpoints").exists()


def test_a_scaling_job_leaves_results_tables_plots_and_what_it_ran_with(cluster: Cluster) -> None:
    job = cluster.jobs["scaling"]
    assert cluster.ends("scaling") == "COMPLETED", cluster.output(f"runs/scaling-{job}", job)
    out = cluster.folder / f"runs/scaling-{job}"
    for kind in ("strong", "weak"):
        lines = (out / kind / "ranks-2/points.jsonl").read_text().splitlines()
        assert [json.loads(line)["ranks"] for line in lines] == [1, 2]
        assert (out / f"{kind}.png").stat().st_size > 0
    assert (out / "report.txt").read_text() in (out / f"job-{job}.out").read_text()
    assert (out / f"job-{job}.sh").read_text() == (cluster.folder / "cpu_scaling.sh").read_text()
    known = dict(line.split("=", 1) for line in (out / f"job-{job}.txt").read_text().splitlines())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert known["commit"].removesuffix("-dirty") == commit
    assert known["SLURM_JOB_NODELIST"] == cluster.slurm.facts(job)["NodeList"]
    assert (cluster.folder / f"slurm-{job}.out").read_text().splitlines()[-1] == f"output: runs/scaling-{job}/job-{job}.out"


def test_the_tasks_of_an_array_train_in_folders_of_their_own(cluster: Cluster) -> None:
    job = cluster.jobs["sweep"]
    for task, rate in enumerate(("1e-3", "5e-3")):
        run = f"runs/cpu_sweep-train.learning_rate-{rate}"
        assert cluster.slurm.wait(f"{job}_{task}", WAIT) == "COMPLETED"
        assert [line["step"] for line in cluster.metrics(run)] == [1, 2]
        assert f"learning_rate = {float(rate)}" in (cluster.folder / run / "config.toml").read_text()


@pytest.mark.wide
def test_the_job_of_a_written_plan_trains_on_its_grid(cluster: Cluster) -> None:
    job = cluster.submit(planned(cluster), **TYPE, MODULES="")
    assert cluster.slurm.wait(job, WAIT) == "COMPLETED", cluster.output("runs/plan-2", job)
    assert [line["step"] for line in cluster.metrics("runs/plan-2")] == [1, 2]
    ran, written = ((cluster.folder / file).read_text() for file in ("runs/plan-2/config.toml", "planned/plan.toml"))
    assert [line for line in ran.splitlines() if line[:2] in ("x ", "y ", "z ")] == ["x = 1", "y = 2", "z = 1"]
    assert 'scheme = "oned-sp"' in ran and "y = 2" in written


def test_srun_ends_when_its_output_goes_into_a_pipe(cluster: Cluster) -> None:
    product = "summa3d gemm --m 300 --n 300 --k 300 --check"
    line = f"srun --nodes=2 --ntasks-per-node=1 {product} 2>&1 | tee piped.txt"
    path = f"{Path(sys.executable).parent}:{cluster.slurm.environment['PATH']}"
    ended = cluster.slurm.run("bash", "-o", "pipefail", "-c", line, cwd=cluster.folder, timeout=WAIT, PATH=path, **COMMON, **TYPE)
    assert ended.stdout == (cluster.folder / "piped.txt").read_text()
    assert "error " in ended.stdout


@pytest.mark.wide
@pytest.mark.parametrize(
    ("at", "ranks", "said"),
    [
        ("1 stop summa3d.train.data.tokens prepare", 4, r"rank 1 \(process \d+\) is stopped"),
        ("1 stop summa3d.train.loop take_step", 4, r"rank 1 \(process \d+\) is stopped"),
        ("1 stop summa3d.train.loop take_step", 2, rf"rank 0 of 2 .*: no training step completed for {PATIENCE} s; the job ends"),
        ("1 kill summa3d.train.loop take_step", 4, r"task 1: Killed"),
    ],
)
def test_a_rank_that_is_stopped_or_killed_under_srun_ends_the_step(
    cluster: Cluster, tmp_path: Path, at: str, ranks: int, said: str
) -> None:
    """Two nodes; with two ranks, each is alone on its node."""
    start = ("srun", "--nodes=2", f"--ntasks-per-node={ranks // 2}", "--kill-on-bad-exit=1")
    program = (sys.executable, str(ROOT / "tests/stopped_rank.py"), "train", cluster.configure("disturbed.toml", steps=4))
    command = [*start, *program, f"--set=grid.x={ranks // 2}", "--set=grid.y=2", f"--run={tmp_path / 'run'}"]
    variables = {"AT": at, "AT_FILE": str(tmp_path / "at"), "SUMMA3D_WATCHDOG": str(PATIENCE), **COMMON, **TYPE}
    environ = cluster.slurm.environment | variables
    ended = subprocess.run(command, cwd=cluster.folder, env=environ, capture_output=True, text=True, timeout=WAIT)
    assert ended.returncode != 0, ended.stderr
    assert re.search(said, ended.stderr), ended.stderr
    assert "stop summa3d.train.loop" not in at or "summa3d doctor --flight" in ended.stderr, ended.stderr


@pytest.mark.wide
def test_a_sweep_is_arrays_over_its_rank_counts_a_job_for_each_number_of_nodes(cluster: Cluster) -> None:
    path = f"{Path(sys.executable).parent}:{cluster.slurm.environment['PATH']}"
    environment = {"PATH": path, "MODULES": "", **COMMON, **TYPE}
    settings = ["ranks=1,2,4", "ranks_per_node=2", "rounds=2", "m=64", "n=64", "k=64"]
    words = ["summa3d", "sweep", "submit", "product-strong", "--dir", "swept", *(f"--set={one}" for one in settings)]
    lines = cluster.slurm.run(*words, cwd=cluster.folder, **environment).stdout.splitlines()
    assert lines == ["sbatch swept/job-1.sh", "sbatch swept/job-2.sh"]
    for line, tasks in zip(lines, (2, 1), strict=True):
        command = ["sbatch", "--parsable", "--cpus-per-task=1", *line.split()[1:]]
        job = cluster.slurm.run(*command, cwd=cluster.folder, **environment).stdout.strip()
        for task in range(tasks):
            assert cluster.slurm.wait(f"{job}_{task}", WAIT) == "COMPLETED"
    found = [json.loads(file.read_text()) for file in sorted(cluster.folder.glob("swept/ranks-*/points.jsonl"))]
    assert [(line["ranks"], line["words"]) for line in found] == [(line["ranks"], line["words_formula"]) for line in found]
    assert [line["ranks"] for line in found] == [1, 2, 4]
