"""Which ranks hold copies of a parameter's block, and whether the copies are equal."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..comm.grid import BaseGrid, agree_on_call
from ..comm.health.agreement import who_passed_what
from ..errors import AgreementError, GridError
from ..layout.layout import Sharding


class Named(NamedTuple):
    """This rank's block of a parameter; sharding: None of a plain torch parameter, of which all ranks hold copies."""

    name: str
    block: Tensor
    sharding: Sharding | None


def check_copies(module: nn.Module) -> None:
    """Raise AgreementError on all ranks unless all copies of each parameter of `module` are equal, bit by bit; collective.

    The message names the first parameter that differs, and which ranks hold which values. Layers keep copies equal where
    optimizers do: `docs/library.md` says which. Parameters of torch's own layers have copies on all ranks. On any grid, dp and
    pp included; copies of dp are equal only where the gradients were summed over it.

    Every rank hashes the blocks of which others hold copies. Moves an all-gather of one word a parameter: (P−1)·parameters words
    on P ranks. Raises GridError where no parameter belongs to a layer of summa3d.
    """
    named = [Named(name, p.detach(), getattr(p, "sharding", None)) for name, p in module.named_parameters()]
    compare(named, grid_of("check_copies", list(module.parameters())), "check_copies")


def compare(named: Sequence[Named], grid: BaseGrid, operation: str) -> None:
    """Do the work of `check_copies` for these blocks on the grid of the whole job."""
    agree_on_call(grid, operation, {"parameters": tuple(item.name for item in named)})
    firsts = [first_holders(item.sharding, grid) for item in named]
    several = [len(set(first.tolist()) - {-1}) < np.count_nonzero(first >= 0) for first in firsts]
    mine = [fingerprint(item.block) if copied and item.block.numel() else 0 for item, copied in zip(named, several, strict=True)]
    gathered = grid.ranked.all_gather(np.array(mine, np.int64)).reshape(grid.size, len(named))
    differ = [place for place, first in enumerate(firsts) if _differ(gathered[:, place], first)]
    if not differ:
        return
    name, result, first = named[differ[0]].name, gathered[:, differ[0]], firsts[differ[0]]
    rank = next(int(rank) for rank in first if rank >= 0 and len(set(result[first == rank])) > 1)
    holders = np.flatnonzero(first == rank).tolist()
    hashes = [f"hash {result[holder] & 0xFFFFFFFF:08x}" for holder in holders]
    more = f" So do {len(differ) - 1} more of {len(named)} parameters." if len(differ) > 1 else ""
    raise AgreementError(
        f"{operation}: the copies of {name} differ: {who_passed_what(hashes, holders)}.{more}\n"
        "  Copies stay equal where every rank makes the same step from equal gradients: clip with summa3d.nn.clip_grad_norm_, "
        "and sum gradients of plain torch parameters and over dp."
    )


def _differ(hashes: np.ndarray, first: np.ndarray) -> bool:
    """Return whether some rank's hash is not that of the first rank that holds the same block."""
    return bool(np.any((first >= 0) & (hashes != hashes[first])))


def grid_of(operation: str, parameters: Sequence[Tensor]) -> BaseGrid:
    """The grid of the whole job that these parameters lie on. Raises GridError unless there is exactly one."""
    grids = {id(p.grid): p.grid for p in parameters if hasattr(p, "grid")}
    if len(grids) > 1:
        raise GridError(
            f"{operation}: the parameters lie on {len(grids)} grids: {'; '.join(map(str, grids.values()))}. Pass those of one."
        )
    if not grids:
        raise GridError(
            f"{operation}: none of the {len(parameters)} parameters belongs to a layer of summa3d, so there is no grid. "
            "torch's own functions take parameters of torch's layers."
        )
    result: BaseGrid = next(iter(grids.values()))
    return result


def first_holders(sharding: Sharding | None, grid: BaseGrid) -> np.ndarray:
    """For each rank of the grid, the first rank that holds an equal block of a parameter; −1 for a rank that holds nothing."""
    known: dict[Sharding | None, np.ndarray] = grid.job.kept[grid].setdefault("first holders", {})
    if sharding not in known:
        first: dict[tuple[tuple[int, int], ...], int] = {}
        holders = []
        for rank in range(grid.size):
            at = grid.coordinates_of(rank)
            slices = () if sharding is None else sharding.layout.slices(sharding.shape, grid.shape, at)
            block = tuple((part.start, part.stop) for part in slices)
            holders.append(-1 if any(start == stop for start, stop in block) else first.setdefault(block, rank))
        known[sharding] = np.array(holders)
    return known[sharding]


def fingerprint(block: Tensor) -> int:
    """A hash of 64 bits of a tensor's bytes."""
    values = block.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(values.data, digest_size=8).digest(), "little", signed=True)
