"""Fixtures of all tests.

The plugin mpiworlds brings `comm`, `world_size` and `shared_tmp_path`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import devices
import hypothesis
import pytest
from fake_clock import FakeClock

pytest_plugins = ("mpiworlds", "pairs")


def pytest_configure(config: pytest.Config) -> None:
    """End the run at once where it cannot be on the device that it shall be on."""
    reason = devices.why_not()
    if reason is not None:
        pytest.exit(reason, returncode=4)
    hypothesis.settings.register_profile("loaded", deadline=None)  # of a case: other work on this machine may take its time
    hypothesis.settings.load_profile("loaded")
    if "SUMMA3D_CACHE" not in os.environ:  # the user's own cells and description of this machine are not for tests
        own = tempfile.mkdtemp(prefix="summa3d-tests-")
        os.environ |= {"SUMMA3D_CACHE": own, "SUMMA3D_CLUSTER": f"{own}/here.toml"}
        config.add_cleanup(lambda: shutil.rmtree(own, ignore_errors=True))
    if devices.NAME == "cuda":
        config.option.fresh_ranks, config.option.lanes = True, 1  # a fork cannot use a GPU that its parent has looked at
    if devices.NAME == "pretended":
        os.environ |= {"SUMMA3D_TESTED_DEVICE": "pretended", "SUMMA3D_DEVICE": "cpu"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a real device, leave out tests that make a device of their own."""
    for item in items if devices.NAME == "cuda" else ():
        if isinstance(item, pytest.Function) and {"pretended", "fake_device"} & vars(item.module).keys():
            item.add_marker(pytest.mark.skip(reason="makes a device of its own"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the Python that jobs of tests are forked from: once, by the pytest that reports."""
    from mpiworlds_parent import may_fork

    parent: Any = session.config.pluginmanager.get_plugin("mpiworlds-parent")
    starts = any("jobs" in vars(item.module) for item in session.items if isinstance(item, pytest.Function))
    if parent and not session.config.option.collectonly and starts and may_fork(session.config):
        import jobs

        server = jobs.warm_server()
        os.environ[jobs.WARM_VARIABLE] = str(server.python)
        parent.account.files.append(server.times)
        session.config.add_cleanup(server.close)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the device that SUMMA3D_DEVICE names, for a test that asks for a communicator."""
    if devices.NAME == "cpu" or "comm" not in request.fixturenames:
        yield
        return
    with devices.taken(request.getfixturevalue("comm"), monkeypatch):
        yield


@pytest.fixture(autouse=True)
def plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no curve of a run on a test's own ranks, which takes longer than a small run; runs of real jobs have theirs."""
    loop = sys.modules.get("summa3d.train.loop")
    if loop is not None and "comm" in request.fixturenames:
        for name in ("draw_loss", "draw_load"):
            monkeypatch.setattr(loop, name, lambda folders, paths: paths[0].touch())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The clock of this process, which the test moves."""
    return FakeClock().patch(monkeypatch)


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
