"""A Slurm of several nodes on this machine, for tests: one slurmctld, and one slurmd a node. It needs root, and no systemd.

Its nodes are this machine, or emulated nodes with a network of their own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from summa3d.launcher.emulate import ENVIRONMENT, SWITCH, Emulated

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
LAUNCHERS = ("SLURM_", "PMI", "OMPI_", "PRTE_", "HYD", "MPI_", "MPIR_", "MPIEXEC_", "SUMMA3D_", "OMP_", "OPENBLAS_", "MKL_")
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")
CORES = 4  # of a node, as Slurm shall believe
GRACE = 120  # seconds that a job of the partition `test` has to save, when one of `urgent` preempts it
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost({address})
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
MinJobAge=3600
KillWait=2
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Return why no Slurm can be started here; None where it can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if missing:
        return f"Slurm is not installed: no {', '.join(missing)} (Debian: apt-get install munge slurmctld slurmd slurm-client)"
    return "only root starts a Slurm" if os.geteuid() != 0 else None


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class LocalSlurm:
    """A running Slurm whose nodes n1, n2, … are this machine, or emulated nodes.

    srun starts ranks by no PMI of its own accord (MpiDefault=none).
    """

    def __init__(self, nodes: int = 4, emulated: Emulated | None = None) -> None:
        self.emulated = emulated
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short, because it holds a socket
        self.nodes = [f"n{index + 1}" for index in range(nodes)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        self.environment = {**kept, "PATH": path, "SLURM_CONF": f"{self.folder}/slurm.conf"}
        self.environment |= {} if emulated is None else ENVIRONMENT
        self._configure()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _configure(self) -> None:
        controller, *ports = free_ports(1 + len(self.nodes))
        shape = f"CPUs={CORES} Sockets=1 CoresPerSocket={CORES} ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN"
        where = [("localhost", "127.0.0.1")] * len(self.nodes)
        if self.emulated is not None:
            where = [*zip(self.emulated.names, self.emulated.addresses, strict=True)]
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} {shape}"
            for name, port, (host, address) in zip(self.nodes, ports, where, strict=True)
        ]
        address = "127.0.0.1" if self.emulated is None else SWITCH
        places = {"address": address, "folder": self.folder, "nodes": "\n".join(lines)}
        text = CONFIGURATION.format(controller=controller, grace=GRACE, **places)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").touch()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        self.folder.chmod(0o755)
        for name in ("state", *(f"{kind}.{node}" for kind in ("spool", "tmp") for node in self.nodes)):
            (self.folder / name).mkdir()

    def _start(self) -> None:
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{name}={self.folder}/{file}" for name, file in {**files, "seed-file": "munged.seed"}.items()]
        self.run("munged", "--force", *options)
        self.run("slurmctld")
        for place, node in enumerate(self.nodes):
            self.run("slurmd", "-N", node, where=None if self.emulated is None else self.emulated.in_node(place))
        deadline = time.monotonic() + 120
        while self.run("sinfo", "-h", "-N", "-p", "test", "-t", "idle", "-o", "%N").stdout.split() != self.nodes:
            assert time.monotonic() < deadline, self.run("sinfo", "-N", "-l").stdout + self.logs()
            time.sleep(0.2)

    def run(
        self, *command: str, cwd: Path | None = None, timeout: float = 120, where: Sequence[str] | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program that knows this Slurm to its end; it must succeed. where : what its command line begins with."""
        environ = self.environment | environment
        if where is None:
            where = () if self.emulated is None else self.emulated.in_switch()
        ended = subprocess.run(
            [*where, *command], cwd=cwd, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )
        assert ended.returncode == 0, f"{' '.join(command)}: {ended.stdout}{ended.stderr}{self.logs()}"
        return ended

    def facts(self, job: str) -> dict[str, str]:
        """Return what Slurm says of a job: JobState, Reason, …"""
        return dict(word.partition("=")[::2] for word in self.run("scontrol", "-o", "show", "job", job).stdout.split())

    def wait(self, job: str, timeout: float) -> str:
        """The state in which a job has ended."""
        deadline = time.monotonic() + timeout
        while (state := self.facts(job)["JobState"]) not in ENDED:
            assert time.monotonic() < deadline, f"job {job} is {state} after {timeout:g} s\n{self.logs()}"
            time.sleep(0.3)
        return state

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "".join(f"\n{log.name}: {log.read_text()[-1000:]}" for log in sorted(self.folder.glob("slurm*.log")))

    def stop(self) -> None:
        """End all jobs, and all processes that know this Slurm, and remove the folder."""
        where = [] if self.emulated is None else self.emulated.in_switch()
        subprocess.run([*where, "scancel", "--user=root"], env=self.environment, capture_output=True, timeout=300)
        deadline = time.monotonic() + 10
        asked = [*where, "squeue", "-h"]
        while time.monotonic() < deadline and subprocess.run(asked, env=self.environment, capture_output=True).stdout:
            time.sleep(0.2)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and self._processes():
                time.sleep(0.1)
        shutil.rmtree(self.folder)

    def _processes(self) -> list[int]:
        """Daemons, steps and ranks: what was started with this Slurm's SLURM_CONF. Steps outlive their slurmd."""
        mark, found = f"SLURM_CONF={self.environment['SLURM_CONF']}\0".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found
