# Fixtures of all tests. The plugin mpiworlds brings `comm`, `world_size` and `shared_tmp_path`.
# May import summa3d, lazily: tests of gemm must not pull in torch through here.
# Next: mpiworlds.py.
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest_plugins = ("mpiworlds",)


@pytest.fixture
def make_grid(comm: Any) -> Iterator[Callable[..., Any]]:
    """``make_grid(x=2, y=2, z=2)`` → a Grid on `comm`, its agreement checks on, freed at the end of the test."""
    grids = []

    def make(
        order: Any = None,
        tile: Any = None,
        check: bool = True,
        node_memory: Any = None,
        transport: str | None = None,
        device: Any = None,
        **axes: int,
    ) -> Any:
        from summa3d.comm.grid import Grid

        options = {"order": order, "tile": tile, "check": check, "node_memory": node_memory}
        grids.append(Grid(comm, axes, **options, transport=transport, device=device))
        return grids[-1]

    yield make
    for grid in grids:
        grid.free()


@pytest.fixture
def kernel_libraries(comm: Any) -> Any:
    """The fused kernels compiled for the host."""
    import host_kernels

    if host_kernels.compiler() is None:
        pytest.skip("no C++ compiler")
    if comm.rank == 0:
        host_kernels.built()
    comm.Barrier()
    return host_kernels.built()
