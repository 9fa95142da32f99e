"""Which transport carries device arrays, by which rule; the probe of MPI; the calls of CuPy that the real device makes."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from pathlib import Path

import fake_device
import fake_nccl
import numpy as np
import pytest

from summa3d.comm.device import arrays, backend
from summa3d.comm.device import cupy as cupy_backend
from summa3d.comm.device import select as places
from summa3d.comm.transport import nccl, probe
from summa3d.comm.transport import select as choice
from summa3d.comm.transport.select import Facts, choose
from summa3d.errors import ConfigError

COMM = Path(arrays.__file__).parent
APART, TOGETHER = ("a/0", "a/1", "b/0", "b/1"), ("a/0", "a/0", "b/0", "b/1")


@pytest.mark.parametrize(
    ("facts", "name", "reason"),
    [
        (Facts(APART, nccl=True, cuda_aware=False), "nccl", "a device of its own"),
        (Facts(APART, nccl=True, cuda_aware=True), "nccl", "a device of its own"),
        (Facts(APART, nccl=False, cuda_aware=True), "cuda-aware", "bindings are not there"),
        (Facts(APART, nccl=False, cuda_aware=False), "pinned", "bindings are not there"),
        (Facts(TOGETHER, nccl=True, cuda_aware=True), "cuda-aware", "2 ranks share device a/0"),
        (Facts(TOGETHER, nccl=True, cuda_aware=False), "pinned", "2 ranks share device a/0"),
    ],
)
def test_the_rule_takes_the_fastest_transport_that_can_work_and_says_why(facts, name, reason):
    chosen = choose(facts)
    assert chosen.name == name and reason in chosen.reason


@pytest.mark.parametrize(
    ("wanted", "facts", "why", "works"),
    [
        ("nccl", Facts(TOGETHER, True, True), "2 ranks share device a/0", "auto, cuda-aware, pinned"),
        ("nccl", Facts(APART, False, False), "bindings are not there", "auto, pinned"),
        ("cuda-aware", Facts(APART, True, False), "does not read device pointers", "auto, pinned, nccl"),
        ("mpi", Facts(APART, True, False), "host MPI does not read device memory", "auto, pinned, nccl"),
    ],
)
def test_a_transport_that_cannot_work_is_an_error_that_names_those_that_can(wanted, facts, why, works):
    with pytest.raises(ConfigError, match=f"transport {wanted} cannot.*{re.escape(why)}(.|\n)*can: {works}"):
        choose(facts, wanted)
    assert choose(facts, "pinned").reason == "asked for"


def test_the_environment_names_a_transport_and_an_unknown_one_is_an_error(monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "pinned")
    assert choice.requested() == "pinned" and choice.requested("nccl") == "nccl"
    monkeypatch.setenv(choice.VARIABLE, "ncl")
    with pytest.raises(ConfigError, match=r"'ncl' does not exist\. Transports: auto, mpi, cuda-aware, pinned, nccl"):
        choice.requested()


@pytest.mark.mpi(sizes=(2,))
def test_ranks_that_share_a_device_take_pinned_copies_and_refuse_nccl_alike(comm, make_grid, monkeypatch):
    monkeypatch.setattr(probe, "cuda_aware", lambda: probe.Probe(False, "a test says so"))
    shared = fake_device.use(fake_device.Device(comm, shared=True))
    axis = make_grid(x=2, device=shared)["x"]
    assert np.array_equal(shared.read(axis.all_gather(shared.put(np.ones(3)))), np.ones(6))
    assert axis.transports.choice.name == "pinned"
    with pytest.raises(ConfigError, match="2 ranks share device device 0"):
        make_grid(x=2, device=shared, transport="nccl")["x"].all_gather(shared.put(np.ones(3)))
    shared.finish()


@pytest.mark.parametrize(
    ("program", "seconds", "works", "reason"),
    [
        ("print('yes')", 200, True, "moved and added"),
        ("print('wrong')", 200, False, "wrong values"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 200, False, "signal 11"),
        ("raise RuntimeError('no CUDA here')", 200, False, "no CUDA here"),
        ("import time; time.sleep(600)", 2, False, "did not end within 2 s"),
    ],
)
def test_whatever_a_probe_does_is_one_line(program, seconds, works, reason):
    found = probe.probe([sys.executable, "-c", program], probe.alone({}), seconds)
    assert found.works is works and reason in found.reason and "\n" not in found.reason


def test_a_probe_is_no_launchers_rank():
    assert probe.alone({"PMI_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0", "PATH": "/bin"}) == {"PATH": "/bin"}


def test_nothing_in_comm_waits_for_a_whole_device():
    words, marks = {"deviceSynchronize", "synchronize"}, {"timeline.py": ("event", "end")}  # marks of timing, as they are named
    for file in COMM.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in words:
                waits_on = ast.unparse(node.func.value)
                is_mark = waits_on.removeprefix("self.").startswith("backend.record(") or waits_on in marks.get(file.name, ())
                assert is_mark, f"{file.name}: {ast.unparse(node)}"


def test_the_fake_device_and_the_real_one_offer_the_same_calls():
    for name, member in inspect.getmembers(backend.Backend):
        if name.startswith("_"):
            continue
        for kind in (fake_device.Device, cupy_backend.CupyBackend):
            one = getattr(kind, name)
            if isinstance(member, property):
                assert isinstance(one, property)
            else:
                assert list(inspect.signature(one).parameters) == list(inspect.signature(member).parameters), (kind, name)


def test_the_real_device_uses_what_cupy_has():
    cupy = pytest.importorskip("cupy")
    used = {
        cupy.cuda: ("get_current_stream", "Stream", "Event", "get_elapsed_time", "alloc_pinned_memory"),
        cupy.cuda.runtime: ("getDevice", "deviceGetPCIBusId", "memcpyAsync", "getDeviceCount", "setDevice"),
        cupy.cuda.Event: ("record", "synchronize", "done"),
        cupy.cuda.Stream: ("wait_event", "ptr"),
        cupy: ("empty", "asarray", "moveaxis", "copyto", "add", "conjugate", "matmul"),
    }
    source = inspect.getsource(cupy_backend.CupyBackend)
    for name in re.findall(r"self\._cuda\.(?:runtime\.)?(\w+)", source):
        assert name == "runtime" or any(name in names for names in used.values()), name
    for owner, names in used.items():
        for name in names:
            assert hasattr(owner, name) or name == "ptr", (owner, name)
    assert "intptr_t dst, intptr_t src, size_t size, int kind, intptr_t stream" in cupy.cuda.runtime.memcpyAsync.__doc__
    assert cupy.cuda.runtime.memcpyDefault == cupy_backend.DEFAULT_KIND


def test_the_fake_nccl_takes_the_arguments_of_cupys():
    pytest.importorskip("cupy")
    real = pytest.importorskip("cupy.cuda.nccl")
    if not real.available:
        pytest.skip("CuPy finds no NCCL library here")
    for name, _ in nccl.DATATYPES.values():
        assert hasattr(real, name), name
    for name in (*nccl.OPERATIONS.values(), "get_unique_id", "groupStart", "groupEnd", "available"):
        assert hasattr(real, name), name
    for name in ("allGather", "allReduce", "reduceScatter", "broadcast", "reduce", "send", "recv"):
        line = getattr(real.NcclCommunicator, name).__doc__.splitlines()[0]
        count = len(re.search(r"\((.*)\)", line)[1].split(",")) - 1
        assert count == len(inspect.signature(getattr(fake_nccl.Communicator, name)).parameters) - 1, line
    assert hasattr(real.NcclCommunicator, "destroy")


def test_bfloat16_and_bool_have_their_names_in_nccl():
    assert nccl.DATATYPES["bfloat16"] == ("NCCL_BFLOAT16", 1) and nccl.DATATYPES["bool"] == ("NCCL_UINT8", 1)
    assert set(nccl.DATATYPES) == set(arrays_that_mpi_carries())


def arrays_that_mpi_carries():
    from summa3d.comm.transport.host import DATATYPES

    return DATATYPES


def test_a_device_array_is_known_by_its_interface_alone():
    one = fake_device.use(fake_device.Device(fake_device.MPI.COMM_SELF)).put(np.ones(2))
    assert arrays.is_on_device(one) and not arrays.is_on_device(np.ones(2))
    assert arrays.kind_of(one) == "fake_device on a device" and arrays.kind_of(np.ones(2)) == "numpy"


def test_each_rank_of_a_node_takes_the_next_device_in_turn():
    assert [places.device_number(rank, 4) for rank in range(6)] == [0, 1, 2, 3, 0, 1]


def test_an_unknown_device_is_an_error_and_the_environment_names_one(monkeypatch):
    monkeypatch.setenv(places.VARIABLE, "cuda")
    assert places.requested_device() == "cuda" and places.requested_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match=r"'gpu' does not exist\. Devices: cpu, cuda"):
        places.requested_device("gpu")


def test_a_device_that_is_not_there_is_an_error_on_every_rank_and_says_what_to_use(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"needs CuPy.*Install it, or use device cpu"):
        places.take_device(fake_device.MPI.COMM_SELF)


def test_cupy_takes_its_memory_from_torchs_pool_on_its_own_stream():
    asked = []
    stream = types.SimpleNamespace(ptr=77)
    cuda = types.SimpleNamespace(
        get_current_stream=lambda: stream,
        PythonFunctionAllocator=lambda malloc, free: types.SimpleNamespace(malloc=(malloc, free)),
        set_allocator=asked.append,
    )
    torch_cuda = types.SimpleNamespace(
        caching_allocator_alloc=lambda *arguments: asked.append(arguments) or 4096,
        caching_allocator_delete=lambda address: asked.append(address),
    )
    places.share_pool(types.SimpleNamespace(cuda=cuda), types.SimpleNamespace(cuda=torch_cuda))
    malloc, free = asked.pop()
    assert malloc(100, 1) == 4096 and malloc(0, 1) == 0
    free(4096, 1)
    assert asked == [(100, 1, 77), 4096]


def test_the_pools_functions_are_those_of_torch_and_cupy():
    cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")
    assert list(inspect.signature(torch.cuda.caching_allocator_alloc).parameters) == ["size", "device", "stream"]
    assert hasattr(torch.cuda, "caching_allocator_delete")
    assert hasattr(cupy.cuda, "PythonFunctionAllocator") and hasattr(cupy.cuda, "set_allocator")
    assert list(inspect.signature(pytest.importorskip("torch").cuda.set_device).parameters) == ["device"]
