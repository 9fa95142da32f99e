"""Run folders: whether one holds a run, and which runs there are beside it."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError

MOST_LISTED = 12


def holds_run(folder: Path) -> bool:
    """Whether a run has begun in a folder, or been imported into it."""
    return (folder / "config.toml").is_file() or any((folder / "checkpoints").glob("step-*"))


def check_run(folder: Path) -> None:
    """Raise ConfigError, which lists the runs beside it, where a folder holds no run."""
    if holds_run(folder):
        return
    beside = folder.parent
    found = sorted(one.name for one in beside.iterdir() if holds_run(one)) if beside.is_dir() else []
    more = f" and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
    listed = f"Runs in {beside}: {', '.join(found[:MOST_LISTED])}{more}." if found else f"There are no runs in {beside}."
    raise ConfigError(f"{folder} holds no run. {listed} --start-or-resume begins one where there is none.")
