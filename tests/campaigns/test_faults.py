"""Planted faults: what is called a failure, and trials of real runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from campaigns import faults

KILLED = """summa3d launch: rank 1 of 2 (process 7) ended first, without a report
what each rank was doing:
  rank 0: waits 0.6 s in all_reduce of float64 [3], sum over x (ranks 0, 1), call 7, for rank 1; a.py:3 in f
  rank 1: runs, and communicates nothing since all_gather of float64 [3] over x (ranks 0, 1), call 6, 0.6 s ago; a.py:2 in f
"""
STOPPED = "  rank 1 (process 7) is stopped\n" + KILLED[KILLED.index("what") :]
BROKEN = "uncaught exception on rank 1 of 2 [F 0.1]:\nTraceback (most recent call last):\nValueError: no\n"


@pytest.mark.parametrize(
    ("kind", "stage", "changes", "problem"),
    [
        ("SIGKILL", "forward", {}, None),
        ("SIGKILL", "forward", {"status": None}, "it did not end"),
        ("SIGKILL", "forward", {"since": None}, "the fault did not strike"),
        ("SIGKILL", "forward", {"since": 11.0}, "it ended 11.0 s after the fault; at most 10"),
        ("SIGSTOP", "forward", {"since": 14.0, "output": STOPPED}, None),
        ("SIGSTOP", "forward", {"since": 14.0}, "no report names the rank"),
        ("SIGSTOP", "forward", {"since": 16.0, "output": STOPPED}, "it ended 16.0 s after the fault; at most 15"),
        ("SIGKILL", "forward", {"status": 0}, "it went on as if nothing had happened"),
        ("SIGKILL", "forward", {"output": KILLED.replace("rank 1 of 2 (p", "rank 0 of 2 (p")}, "no report names the rank"),
        ("exception", "forward", {"output": BROKEN.replace("rank 1", "rank 0")}, "no report names the rank"),
        ("SIGKILL", "forward", {"output": 2 * KILLED}, "2 tables"),
        ("SIGKILL", "forward", {"left": ["process 7 (python)"]}, "left behind: process 7 (python)"),
        ("lock held", "forward", {}, None),
        ("lock held", "forward", {"output": KILLED[: KILLED.index("what")]}, "no report names the rank"),
        ("desynchronised call", "forward", {"output": "AgreementError: x\n  max on rank 0; sum on rank 1\n"}, None),
        (
            "desynchronised call",
            "forward",
            {"output": "AgreementError: x\n  max on rank 0; sum on rank 2\n"},
            "no report names the rank",
        ),
        ("exception", "forward", {"output": BROKEN}, None),
        ("exception", "forward", {"output": BROKEN + "GridError: rank 1\n"}, "2 reports"),
        ("full disk", "write", {"output": "CheckpointError: no room: trial/run/step-3\n"}, None),
        ("full disk", "write", {"output": "CheckpointError: no room\n"}, "no report names the file"),
        ("full disk", "write", {"output": f"{BROKEN} trial/run"}, "a traceback"),
        ("slow rank", "write", {"status": 0}, None),
        ("slow rank", "write", {"status": 1}, "it ended with status 1, and was to go on"),
        ("failing write", "write", {"status": 0, "output": "The file is not written. Trying\n  again."}, None),
        ("failing write", "write", {"status": 0}, "the failed write was not said"),
        ("SIGTERM", "write", {"status": 75, "output": "rank 1 got SIGTERM: saved after step\n  3 of 20"}, None),
        ("SIGTERM", "write", {"status": 75, "output": "rank 1 got SIGTERM: saved after step 4 of 20"}, "status 75, saved step-3"),
    ],
)
def test_what_does_not_hold_of_an_end_is_said(kind: str, stage: str, changes: dict[str, Any], problem: str | None) -> None:
    fault = faults.Fault(kind, stage, 1, 3, 0.0, "")
    ended = replace(faults.Ended(9, KILLED, 30.0, 0.5, []), **changes)
    problems = faults.judge(fault, ended, limit=5.0, room=0.0, saved=Path("step-3"))
    assert [one.partition(": [")[0] for one in problems] == ([] if problem is None else [problem])


def test_dalys_interval_is_where_his_share_is_largest() -> None:
    """And without failures nothing is lost but checkpoints."""
    best, share = faults.daly(60.0, 0.5, 4.0)
    assert best == pytest.approx(7.3, abs=0.2)

    def useful(tau: float) -> float:
        return tau / (60.0 * np.exp(4.0 / 60.0) * np.expm1((tau + 0.5) / 60.0))

    assert share == pytest.approx(useful(best)) and all(useful(best * factor) < share for factor in (0.7, 0.85, 1.2, 1.5))
    assert faults.daly(1e9, 0.5, 4.0)[1] == pytest.approx(1.0, abs=1e-4)


def trials(file: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(jobs.ROOT / "tests" / "campaigns"), "faults", "--room", "60", "--json", str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(file.read_text())["trials"]
    assert f"{len(found)} faults: 0 findings" in done.stdout
    return found


@pytest.mark.wide
def test_a_fault_ends_a_run_that_then_comes_to_the_same_numbers(tmp_path: Path) -> None:
    (trial,) = trials(tmp_path / "faults.json", "--ranks", "2", "--trials", "1", "--kinds", "exception", "--seed", "7")
    assert trial["status"] == 1 and trial["fault"]["stage"] == "write" and trial["again"] == 1


@pytest.mark.wide
def test_every_kind_of_fault_once(tmp_path: Path) -> None:
    found = trials(tmp_path / "faults.json", "--ranks", "4", "--trials", "1")
    assert [trial["fault"]["kind"] for trial in found] == list(faults.KINDS)
