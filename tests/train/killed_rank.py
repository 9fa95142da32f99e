"""`summa3d ARGS…` on a rank that kills itself in the middle of writing checkpoint step-4.

Started by test_killed.py. KILLED="1 file": rank 1, when half of its file is on the disk. KILLED="0 rename": rank 0, when all
is but the final name.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from summa3d.cli.main import main
from summa3d.launch.runtime import launched_as
from summa3d.train.checkpoint import shards

TEMPORARY = ".tmp-step-4"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_a_file(tensors: Any, path: Path) -> None:
    save_file(tensors, path)
    if TEMPORARY in str(path):
        os.truncate(path, path.stat().st_size // 2)
        die()


def no_rename(source: Any, target: Any, **options: Any) -> None:
    if TEMPORARY in str(source):
        assert (Path(source) / "index.json").is_file()
        die()
    rename(source, target, **options)


save_file, rename = shards.save_file, os.rename

if __name__ == "__main__":
    rank, _, moment = os.environ["KILLED"].partition(" ")
    launched = launched_as()
    assert launched is not None
    if launched[1] == int(rank):
        if moment == "file":
            shards.save_file = half_a_file
        else:
            os.rename = no_rename
    sys.exit(main(sys.argv[1:]))
