"""One rank of `summa3d.launch`: calls what its folder holds, and leaves there what it returns, or what it has raised."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from ..files import replacing
from .call import CALL, FAILURE, PATHS, RESULT


def main() -> None:
    """Call the function of the folder that sys.argv names; an exception on this rank ends the job on all."""
    import cloudpickle
    from mpi4py import MPI

    folder, rank = Path(sys.argv[1]), MPI.COMM_WORLD.rank
    try:
        paths = json.loads((folder / PATHS).read_text(encoding="utf-8"))
        sys.path.extend(path for path in paths if path not in sys.path)
        function, arguments = cloudpickle.loads((folder / CALL).read_bytes())
        result = cloudpickle.dumps(function(*arguments))
    except BaseException:
        (folder / FAILURE.format(rank)).write_text(traceback.format_exc(), encoding="utf-8")
        raise
    with replacing(folder / RESULT.format(rank)) as new:
        new.write_bytes(result)


if __name__ == "__main__":
    main()
