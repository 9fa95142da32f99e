"""Products and distributed matrices of device arrays, on a fake device: the results and the words of the host's."""

from __future__ import annotations

import re
import subprocess
import sys

import fake_cublas
import fake_device
import numpy as np
import pytest

from summa3d.errors import ShapeError
from summa3d.gemm import DistMatrix, matmul
from summa3d.gemm.algorithms.registry import ALGORITHMS
from summa3d.gemm.local.blas import accumulate
from summa3d.layout.distribute import collect

CASES = [
    ("cuboid", {"x": 2, "y": 2, "z": 1}, "nn", "float64", 1, 0),
    ("cuboid", {"x": 1, "y": 2, "z": 2}, "nt", "complex128", 2, 3),
    ("cuboid", {"x": 1, "y": 1, "z": 4}, "tn", "float32", 1, 1),
    ("cuboid", {"x": 2, "y": 1, "z": 2}, "tt", "int32", 2, 3),
    ("cuboid", {"x": 1, "y": 2, "z": 2}, "nn", "float16", 1, 0),
    ("summa", {"x": 2, "y": 2}, "nn", "float64", 2, 3),
    ("summa", {"x": 2, "y": 2}, "nt", "float64", 1, 1),
    ("summa", {"x": 2, "y": 2}, "tt", "float64", 2, 3),
    ("cannon", {"x": 2, "y": 2}, "nn", "float64", 1, 0),
    ("cannon", {"x": 2, "y": 2}, "tt", "float64", 1, 1),
]


def elements(rows, columns, seed, dtype):
    values = np.random.default_rng(seed).integers(-2, 3, (rows, columns))
    return (values + 1j * values[::-1] if dtype.startswith("complex") else values).astype(dtype)


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("transport", ["nccl", "pinned"])
def test_products_on_a_device_are_those_of_the_host_word_for_word(comm, make_grid, transport):
    for name, shape, form, dtype, alpha, beta in CASES:
        device = fake_device.use(fake_device.Device(comm, "random", seed=comm.rank))
        plan = ALGORITHMS[name].plan(form, 7, 5, 11)
        whole = [elements(*plan.a_shape, 1, dtype), elements(*plan.b_shape, 2, dtype), elements(7, 5, 3, dtype)]
        layouts = (plan.a_layout, plan.b_layout, plan.c_layout)
        found = []
        for grid in (make_grid(**shape, node_memory=False), make_grid(**shape, transport=transport, device=device)):
            a, b, c = (DistMatrix.from_global(one, grid, layout) for one, layout in zip(whole, layouts, strict=True))
            if grid.job.device is not None:
                a, b, c = (DistMatrix(device.put(one.block), one.layout, grid, one.shape) for one in (a, b, c))
            with grid.ledger.watch() as moved:
                matmul(a, b, form, algorithm=name, alpha=alpha, beta=beta, out=c)
            got = c.to_global()
            found.append((got if grid.job.device is None else device.read(got), moved.words, moved.messages))
        device.finish()
        left, right = (one.T if letter == "t" else one for one, letter in zip(whole, form, strict=False))
        want = alpha * (left.astype(complex) @ right.astype(complex)) + beta * whole[2]
        assert np.array_equal(found[1][0], want.astype(dtype) if dtype.startswith("complex") else want.real), (name, form, dtype)
        assert found[0][1:] == found[1][1:], (name, form, dtype)


@pytest.mark.parametrize("form", ["nn", "nt", "tn", "cn", "nc"])
def test_a_local_product_on_a_device_is_one_call_that_adds_into_c(form):
    device = fake_device.use(fake_device.Device(fake_device.MPI.COMM_SELF, "random"))
    a, b, c = (elements(*shape, seed, "complex128") for seed, shape in enumerate(((4, 4), (4, 4), (4, 4))))
    out = device.put(c)
    accumulate(device.put(a), device.put(b), form, out, 2, 1)
    turned = {"n": lambda one: one, "t": lambda one: one.T, "c": lambda one: one.T.conj()}
    assert np.array_equal(device.read(out), 2 * turned[form[0]](a) @ turned[form[1]](b) + c)
    assert [call for call in device.calls if call[0] == "gemm"] == [("gemm", 2, 1)]


@pytest.mark.parametrize("sums", ["float16", "float32"])
@pytest.mark.parametrize("form", ["nn", "nt", "tn", "tt", "cn", "nc"])
def test_16_bit_operands_on_a_device_are_read_as_they_lie(form, sums):
    """By rows, by columns, as columns of a wider matrix, one row, one column; only what has gaps in rows is copied."""
    device = fake_device.use(fake_device.Device(fake_device.MPI.COMM_SELF, "random"))
    for number, (m, n, k) in enumerate(((3, 4, 5), (1, 4, 5), (3, 1, 5), (3, 4, 1), (1, 1, 7))):
        shapes = ((m, k) if form[0] == "n" else (k, m), (k, n) if form[1] == "n" else (n, k), (m, n))
        c = elements(*shapes[2], 3, sums)
        for place in ("rows", "columns", "among columns", "with gaps"):
            a, b = (placed(device, elements(*shape, seed, "float16"), place) for seed, shape in enumerate(shapes[:2]))
            out = placed(device, c, "among columns" if number % 2 else "rows")
            accumulate(a, b, form, out, 2, 3)
            left, right = (device.read(one).astype(float) for one in (a, b))
            want = 2 * (left if form[0] == "n" else left.T) @ (right if form[1] == "n" else right.T) + 3 * c
            assert np.array_equal(device.read(out), want), (form, place, (m, n, k))
    assert set(device.calls) == {("gemm", 2, 3)}


def placed(device, values, place):
    """`values` on the device, by rows, by columns, or as part of a larger matrix by rows."""
    rows, columns = values.shape
    if place == "rows":
        return device.put(values)
    if place == "columns":
        return device.put(np.ascontiguousarray(values.T)).T
    part = (slice(1, rows + 1), slice(2, columns + 2)) if place == "among columns" else (slice(0, None, 2), slice(0, None, 2))
    whole = np.full((2 * rows + 2, 2 * columns + 2), 99, values.dtype)
    cut = whole[part][:rows, :columns]
    cut[...] = values
    return device.put(whole)[part][:rows, :columns]


@pytest.mark.mpi(sizes=(4,))
def test_16_bit_products_on_a_device_copy_no_operand_to_float32(comm, make_grid):
    """C is summed in float32 where several products meet in it, and is otherwise written as it is, β·C included."""
    for name, shape, room in (
        ("cuboid", {"x": 2, "y": 2, "z": 1}, lambda a, b, c: 4 * (a + b)),
        ("cuboid", {"x": 1, "y": 2, "z": 2}, lambda a, b, c: 4 * a + 4 * (4 * c + c)),
        ("summa", {"x": 2, "y": 2}, lambda a, b, c: 2 * (a + b) + 4 * c),
        ("cannon", {"x": 2, "y": 2}, lambda a, b, c: 4 * (a + b) + 4 * c),
        ("oned-column", {"y": 4}, lambda a, b, c: 0),
        ("oned-row", {"y": 4}, lambda a, b, c: 4 * c),
    ):
        device = fake_device.use(fake_device.Device(comm, "random", seed=comm.rank))
        grid = make_grid(**shape, transport="nccl", device=device)
        plan = ALGORITHMS[name].plan("nn", 8, 4, 16)
        whole = [elements(*extent, seed, "float16") for seed, extent in enumerate((plan.a_shape, plan.b_shape, plan.c_shape))]
        a, b, c = (
            device.put(DistMatrix.from_global(one, grid, layout).block)
            for one, layout in zip(whole, (plan.a_layout, plan.b_layout, plan.c_layout), strict=True)
        )
        grid.ledger.reset_peak()
        ALGORITHMS[name].executor(plan, grid).run(a, b, c, 2, 3)
        got = collect(device.read(c), grid, plan.c_layout, plan.c_shape)
        want = 2 * whole[0].astype(float) @ whole[1].astype(float) + 3 * whole[2]
        assert np.array_equal(got, want), name
        volume = ALGORITHMS[name].volume(plan, grid.shape, "float16", device=True)
        assert grid.ledger.workspace_peak == 2 * volume.workspace_of(grid.coordinates), name
        assert grid.ledger.workspace_peak <= room(a.size, b.size, c.size), name
        device.finish()


def test_the_fake_cublas_takes_the_arguments_of_cupys():
    cuda = pytest.importorskip("cupy.cuda")
    try:
        real = cuda.cublas
    except ImportError:
        pytest.skip("CuPy finds no cuBLAS here")
    fake = fake_cublas.cuda(lambda call, run: None)
    for owner, ours in ((real, fake.cublas), (cuda.runtime, fake.runtime), (cuda, fake)):
        for name in (name for name in dir(ours) if not name.startswith("_") and name != "queue"):
            assert hasattr(owner, name), name
    line = real.gemmEx.__doc__.splitlines()[0]
    taken = [part.split()[-1] for part in re.search(r"\((.*)\)", line)[1].split(", ")]
    of_a, of_b, of_c = (["A", "Atype", "lda"], ["B", "Btype", "ldb"], ["C", "Ctype", "ldc"])
    assert taken == ["handle", "transa", "transb", "m", "n", "k", "alpha", *of_a, *of_b, "beta", *of_c, "computeType", "algo"]
    assert callable(real.setMathMode) and callable(cuda.Stream.from_external)


@pytest.mark.mpi(sizes=(2,))
def test_a_product_of_a_host_and_a_device_matrix_is_an_error(comm, make_grid):
    device = fake_device.use(fake_device.Device(comm))
    grid = make_grid(x=1, y=1, z=2, device=device, transport="pinned")
    plan = ALGORITHMS["cuboid"].plan("nn", 4, 4, 4)
    a = DistMatrix.from_global(np.ones((4, 4)), grid, plan.a_layout)
    b = DistMatrix.from_global(np.ones((4, 4)), grid, plan.b_layout)
    with pytest.raises(ShapeError, match="numpy and B of fake_device on a device"):
        matmul(a, DistMatrix(device.put(b.block), b.layout, grid, b.shape))
    device.finish()


@pytest.mark.mpi(sizes=(4,))
def test_a_device_matrix_is_redistributed_and_measured(comm, make_grid):
    device = fake_device.use(fake_device.Device(comm, "eager"))
    grid = make_grid(x=2, y=2, device=device, transport="nccl")
    plan = ALGORITHMS["summa"].plan("nn", 7, 5, 3)
    whole = elements(7, 5, 4, "float64")
    host = DistMatrix.from_global(whole, grid, plan.c_layout)
    matrix = DistMatrix(device.put(host.block), host.layout, grid, host.shape)
    dealt = matrix.to_scalapack(("x", 2), ("y", 1))
    assert np.array_equal(device.read(dealt.redistribute(plan.c_layout).to_global()), whole)
    assert matrix.norm() == pytest.approx(np.linalg.norm(whole))
    device.finish()


def test_gemm_works_where_neither_torch_nor_cupy_can_be_imported():
    program = """
import sys
for name in ("torch", "cupy", "cupy_backends", "cuda"):
    sys.modules[name] = None
import numpy as np, summa3d
from mpi4py import MPI
grid = summa3d.Grid(MPI.COMM_SELF, {"x": 1, "y": 1, "z": 1})
plan = summa3d.gemm.CuboidPlan("nn", m=3, n=4, k=5)
a = summa3d.DistMatrix.from_global(np.ones((3, 5)), grid, plan.a_layout)
b = summa3d.DistMatrix.from_global(np.ones((5, 4)), grid, plan.b_layout)
print((a @ b).to_global().sum())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.strip() == "60.0", done.stderr
