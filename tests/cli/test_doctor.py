"""`summa3d doctor` reports what an installation runs on and warns of what slows or breaks it."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections import namedtuple
from pathlib import Path

import jobs
import numpy
import pytest

from summa3d.blas_library import BLAS_OVERRIDES
from summa3d.cli import doctor
from summa3d.launcher import segments
from summa3d.launcher.runtime import Runtime, find_launcher, loaded_runtime, usable_cores

Disk = namedtuple("Disk", "total used free")


def examined(extra: dict[str, str] | None = None) -> dict[str, object]:
    ended = jobs.run_serial(["-m", "summa3d", "doctor", "--json"], extra, fresh=True)
    assert ended.status == 0, ended.stderr
    found: dict[str, object] = json.loads(ended.stdout)
    return found


def test_it_reports_the_versions_and_the_launcher_in_use() -> None:
    found = examined()
    runtime = loaded_runtime()
    assert str(found["python"]).startswith(platform.python_version())
    assert found["packages"]["numpy"] == numpy.__version__  # type: ignore[index]
    assert found["mpi"] == {"library": runtime.name, "file": str(runtime.library)}
    assert found["launcher"] == list(find_launcher(runtime).command)
    assert found["cores"] == usable_cores()


def test_it_names_the_kernels_that_openblas_chose() -> None:
    found = examined()
    blas = found["blas"]
    assert isinstance(blas, dict)
    if "openblas" not in str(blas["name"]):
        pytest.skip("numpy was built with another BLAS")
    assert blas["core_type"]


def test_it_says_how_ranks_communicate_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUMMA3D_NODE_MEMORY", raising=False)
    assert "node memory within a node" in doctor._transport() or "needs Linux" in doctor._transport()
    monkeypatch.setenv("SUMMA3D_NODE_MEMORY", "no")
    assert doctor._transport() == "MPI only; no node memory: SUMMA3D_NODE_MEMORY=no"


def test_it_says_plainly_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    assert doctor._gpu().startswith("no GPU")


def test_it_warns_of_an_exported_core_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BLAS_OVERRIDES:
        monkeypatch.delenv(name, raising=False)
    clean, forced = examined(), examined({"OPENBLAS_CORETYPE": "Haswell"})
    assert not any("OPENBLAS_CORETYPE" in warning for warning in clean["warnings"])  # type: ignore[attr-defined]
    assert any("OPENBLAS_CORETYPE=Haswell" in warning for warning in forced["warnings"])  # type: ignore[attr-defined]


def test_it_warns_of_a_small_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Disk(64 << 20, 0, 64 << 20))
    (warning,) = segments.warnings(27, tmp_path)
    assert "64 MiB free, and 27 ranks of MPICH need 170 MiB" in warning and "--shm-size" in warning
    (tmp_path / "mpich_shm_1a_0").write_bytes(b"x")
    (warning,) = segments.warnings(27, tmp_path)
    assert warning.endswith(f"rm {tmp_path / 'mpich_shm_1a_0'}")
    assert segments.warnings(9, tmp_path) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Disk(1 << 30, 0, 1 << 30))
    assert segments.warnings(27, tmp_path) == []


def test_what_a_job_that_failed_left_is_removed_and_what_others_use_or_left_before_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(segments, "PATIENCE", 0.1)
    before, left, used = (tmp_path / f"mpich_shm_{name}_0" for name in ("b", "1", "a"))
    (tmp_path / "mine").write_bytes(b"x")
    before.write_bytes(b"x")
    os.utime(before, (100.0, 100.0))
    left.write_bytes(b"x")
    with used.open("w"):
        segments.remove_left(200.0, tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", used.name, before.name]
    segments.remove_left(200.0, tmp_path)
    assert before.exists() and not used.exists()


def test_it_warns_of_a_library_path_that_hides_the_mpi_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libmpi.so.12").touch()
    (tmp_path / "libfabric.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    warnings = doctor._shadow_warnings(Runtime("mpich", "5.0.2", Path("/elsewhere/lib/libmpi.so.12")))
    assert any(str(tmp_path) in warning and "libfabric, libmpi" in warning for warning in warnings)


def test_without_json_it_prints_one_fact_a_line() -> None:
    ended = jobs.run_serial(["-m", "summa3d", "doctor"])
    names = [line.split()[0] for line in ended.stdout.splitlines() if not line.startswith("warning: ")]
    assert names == [
        "python",
        "packages",
        "blas",
        "products",
        "tensors",
        "mpi",
        "launcher",
        "cores",
        "nodes",
        "transport",
        "gpu",
        "device",
    ]


@pytest.mark.parametrize(
    ("kind", "environment", "warned"),
    [("none", {}, True), ("none", {"SLURM_MPI_TYPE": "pmi2"}, False), ("pmi2", {}, False), ("pmix_v4", {}, False)],
    ids=str,
)
def test_in_a_slurm_job_it_compares_how_srun_starts_ranks_with_the_mpi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, environment: dict[str, str], warned: bool
) -> None:
    program(tmp_path / "srun", "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions: pmix_v4")
    program(tmp_path / "scontrol", f"AuthType = munge\nMpiDefault              = {kind}\nMpiParams = (null)")
    for name, value in {"PATH": str(tmp_path), "SLURM_JOB_ID": "17", **environment}.items():
        monkeypatch.setenv(name, value)
    warnings: list[str] = []
    used = environment.get("SLURM_MPI_TYPE", kind)
    assert doctor._slurm(Runtime("mpich", "5.0.2", None), warnings) == {"slurm": f"job 17, where srun starts ranks by {used}"}
    assert warnings == warned * [
        "without --mpi, srun starts ranks by none, each of which would be a job of its own with MPICH 5.0.2. Try srun --mpi=pmi2 "
        "(SLURM_MPI_TYPE=pmi2 in the environment does the same; srun --mpi=list: none, pmi2, pmix)."
    ]


def test_it_names_mpiexec_where_srun_has_no_option_for_the_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path / "srun", "srun: MPI types are...\nsrun: none\nsrun: pmi2")
    program(tmp_path / "scontrol", "MpiDefault = pmi2")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    warnings: list[str] = []
    doctor._slurm(Runtime("openmpi", "5.0.11", None), warnings)
    assert warnings[0].endswith("no other option for this MPI (srun --mpi=list: none, pmi2): use the MPI's own mpiexec.")


def program(path: Path, says: str) -> None:
    path.write_text(f"#!/bin/bash\necho '{says}'\n")
    path.chmod(0o755)


def test_a_library_that_cannot_be_loaded_is_reported_and_fails() -> None:
    ended = jobs.run_serial(["-m", "summa3d", "doctor"], {"MPI4PY_LIBMPI": "/nowhere/libmpi.so.12"}, fresh=True)
    assert ended.status == 1
    assert "mpi4py cannot load an MPI library" in ended.stdout
    assert "Traceback" not in ended.stderr


def test_a_load_above_the_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (1.9, 0.0, 0.0))
    assert not any("load" in warning for warning in doctor._load_warnings())
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (17.3, 0.0, 0.0))
    [warning] = doctor._load_warnings()
    assert "the load is 17.3 on 2 cores" in warning and "OMP_NUM_THREADS=1" in warning
