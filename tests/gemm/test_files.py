"""Raw and HDF5 files of distributed matrices, files that are none, and faults: the same error on every rank, and no file left."""

from __future__ import annotations

import pickle
import resource

import numpy as np
import pytest
from kinds import numbers, plain
from matrices import GRIDS, cases

from summa3d.errors import ConfigError, DataError, ShapeError
from summa3d.gemm import DistMatrix
from summa3d.gemm.files import hdf5, raw


def on_first(comm, step):
    """Let rank 0 make files, and all see them."""
    if comm.rank == 0:
        step()
    comm.Barrier()


@pytest.mark.mpi(sizes=(1, 6))
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float64", ">f4", "complex64", "int32", "bfloat16"])
def test_a_raw_file_is_read_and_written_by_rows_or_columns_and_moves_nothing(
    comm, make_grid, shared_tmp_path, dtype, order, monkeypatch
):
    from summa3d.comm.device.arrays import numpy_dtype

    grid, kind = make_grid(**GRIDS[comm.size]), numpy_dtype(dtype)
    whole = np.asarray(numbers("complex64" if "c" in dtype else "int32", (7, 11), 3)).astype(kind)
    path, copy = shared_tmp_path / "a.bin", shared_tmp_path / "copy.bin"
    on_first(comm, lambda: path.write_bytes(b"12345" + whole.tobytes(order)))
    for layout, short in ((layout, short) for layout in cases(comm) for short in (0, 4096)):
        monkeypatch.setattr(raw, "SHORT", short)
        with grid.ledger.watch() as moved:
            matrix = DistMatrix.from_raw(path, (7, 11), grid, layout, dtype, offset=5, order=order)
            matrix.to_raw(copy, order)
        assert moved.calls == 0 and matrix.dtype.isnative and matrix.is_transposed == (order == "F")
        assert np.array_equal(matrix.block, DistMatrix.from_global(whole, grid, layout).block), layout
        assert copy.read_bytes() == whole.astype(kind.newbyteorder("=")).tobytes(order), layout
        comm.Barrier()


@pytest.mark.mpi(sizes=(2,))
def test_a_torch_matrix_of_bfloat16_writes_its_bits(comm, make_grid, shared_tmp_path):
    grid, whole = make_grid(x=2), np.asarray(numbers("int32", (7, 5), 3))
    matrix = DistMatrix.from_global(whole.astype("float32"), grid, "m:x k").to("torch").astype("bfloat16")
    matrix.T.to_raw(shared_tmp_path / "a.bin", "F")
    back = DistMatrix.from_raw(shared_tmp_path / "a.bin", (5, 7), grid, "m k:x", "bfloat16", order="F")
    assert np.array_equal(plain(back.T.to_global()), whole)


@pytest.mark.mpi(sizes=(1, 6))
@pytest.mark.parametrize("chunks", [None, (2, 4)])
def test_hdf5_datasets_are_read_as_hyperslabs_and_written_beside_others(comm, make_grid, shared_tmp_path, chunks, monkeypatch):
    h5py = pytest.importorskip("h5py")
    grid, path, copy = make_grid(**GRIDS[comm.size]), shared_tmp_path / "a.h5", shared_tmp_path / "copy.h5"
    for number, (layout, dtype) in enumerate(
        zip(cases(comm), ["float64", ">f4", "complex64", "bool", "int32"] * 2, strict=False)
    ):
        whole = np.asarray(numbers(np.dtype(dtype).name, (7, 11), number)).astype(dtype)

        def make(whole=whole, number=number):
            with h5py.File(path, "a") as file:
                file.create_dataset(f"group/{number}", data=whole, chunks=chunks)

        on_first(comm, make)
        for short in (0, 4096):
            monkeypatch.setattr(hdf5, "SHORT", short)
            with grid.ledger.watch() as moved:
                matrix = DistMatrix.from_hdf5(path, f"group/{number}", grid, layout)
            assert moved.calls == 0 and matrix.dtype.isnative
            assert np.array_equal(matrix.block, DistMatrix.from_global(whole, grid, layout).block), layout
        matrix.to_hdf5(copy, str(number % 3))  # from the fourth on in place of another
        with h5py.File(copy) as file:
            assert np.array_equal(file[str(number % 3)][:], whole) and len(file) == min(number + 1, 3)
        comm.Barrier()
    DistMatrix.zeros((0, 4), grid, "m:x k").to_hdf5(copy, "empty")
    assert DistMatrix.from_hdf5(copy, "empty", grid, "m:x k").shape == (0, 4)
    assert not list(shared_tmp_path.glob("*.part"))


@pytest.mark.mpi(sizes=(3,))
def test_files_of_other_kinds_are_named_and_nothing_advises_to_load_them(comm, make_grid, shared_tmp_path):
    grid, folder = make_grid(x=3), shared_tmp_path

    def make():
        np.savez(folder / "archive.npz", np.ones((2, 2)))
        (folder / "pickled.npy").write_bytes(pickle.dumps(np.ones((2, 2))))
        np.save(folder / "objects.npy", np.array([[{}]]), allow_pickle=True)
        (folder / "raw.npy").write_bytes(bytes(64))
        (folder / "empty.npy").write_bytes(b"")
        np.save(folder / "short.npy", np.ones((9, 9)))
        with (folder / "short.npy").open("r+b") as file:
            file.truncate(200)
        (folder / "a.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))

    on_first(comm, make)
    refused = {
        "archive.npz": "is an archive, as numpy.savez writes. from_raw",
        "pickled.npy": "is a pickle, which is never loaded",
        "objects.npy": "is not a .npy file that can be read: .*Python objects",
        "raw.npy": "is no .npy file: it has no header of one. from_raw",
        "empty.npy": "is no .npy file",
        "short.npy": "is not a .npy file that can be read: mmap length is greater than file size",
        "a.h5": "is an HDF5 file. .*from_hdf5",
        "": "Is a directory",
    }
    for name, words in refused.items():
        with pytest.raises(DataError, match=words) as caught:
            DistMatrix.from_file(folder / name, grid, "m:x k")
        assert "load" not in str(caught.value).replace("never loaded", "") and "trust" not in str(caught.value)


@pytest.mark.mpi(sizes=(3,))
def test_faults_of_raw_and_hdf5_files_are_one_error_on_every_rank(comm, make_grid, shared_tmp_path):
    h5py = pytest.importorskip("h5py")
    grid, path, other = make_grid(x=3), shared_tmp_path / "a.bin", shared_tmp_path / "a.h5"

    def make():
        path.write_bytes(bytes(7 * 5 * 8 - 1))
        with h5py.File(other, "w") as file:
            file["vector"], file["texts"], file["matrix"] = np.ones(3), [["a"]], np.ones((2, 2))
            file.create_group("group")

    on_first(comm, make)
    a = DistMatrix.ones((7, 5), grid, "m:x k")
    refused = [
        (lambda: DistMatrix.from_raw(path, (7, 5), grid, "m:x k"), DataError, "279 bytes; a 7×5 matrix of float64 at offset 0"),
        (lambda: DistMatrix.from_raw(path, (7, 4), grid, "m:x k"), DataError, "Shape, dtype or offset are others"),
        (lambda: DistMatrix.from_raw(path, (7, 5), grid, "m:x k", offset=-1), DataError, "offset is -1"),
        (lambda: DistMatrix.from_raw(path, (7, 5), grid, "m:x k", object), DataError, "dtype object"),
        (lambda: DistMatrix.from_raw(path, (7, 5), grid, "m:x k", order="K"), ShapeError, "order 'K' is none of C"),
        (lambda: DistMatrix.from_raw(path.with_name("none"), (7, 5), grid, "m:x k"), DataError, "No such file"),
        (lambda: DistMatrix.from_hdf5(path.with_name("none"), "a", grid, "m:x k"), DataError, "No such file"),
        (lambda: DistMatrix.from_hdf5(path, "a", grid, "m:x k"), DataError, "cannot be read as HDF5"),
        (
            lambda: DistMatrix.from_hdf5(other, "a", grid, "m:x k"),
            DataError,
            "no dataset 'a'. Datasets of its root: matrix, ",
        ),
        (lambda: DistMatrix.from_hdf5(other, "group", grid, "m:x k"), DataError, "no dataset 'group'"),
        (lambda: DistMatrix.from_hdf5(other, "vector", grid, "m:x k"), DataError, "no matrix (2 dims), but (3,)"),
        (lambda: DistMatrix.from_hdf5(other, "texts", grid, "m:x k"), DataError, "not numbers"),
        (lambda: a.to_raw(path.with_name("none") / "a"), DataError, "cannot be written"),
        (lambda: a.to_raw(path, "K"), ShapeError, "order 'K'"),
        (lambda: a.to_hdf5(path.with_name("none") / "a", "a"), DataError, "cannot be written"),
        (lambda: a.to_hdf5(path, "a"), DataError, "a.bin.part cannot be written: .*signature"),
        (lambda: a.astype("bfloat16").to_hdf5(other, "b"), DataError, "cannot hold bfloat16"),
    ]
    for attempt, kind, words in refused:
        with pytest.raises(kind, match=words.replace("(", r"\(").replace(")", r"\)")):
            attempt()
    comm.Barrier()
    assert sorted(one.name for one in shared_tmp_path.iterdir()) == ["a.bin", "a.h5"] and path.stat().st_size == 279


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("kind", ["raw", "hdf5"])
def test_a_disk_that_is_full_leaves_the_old_file(comm, make_grid, shared_tmp_path, kind):
    pytest.importorskip("h5py")
    grid, before, path = make_grid(x=2), resource.getrlimit(resource.RLIMIT_FSIZE), shared_tmp_path / "a"
    small, large = DistMatrix.ones((3, 3), grid, "m:x k"), DistMatrix.ones((1000, 100), grid, "m:x k")
    write = (lambda one: one.to_raw(path)) if kind == "raw" else (lambda one: one.to_hdf5(path, "a"))
    write(small)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # as a full disk, or a quota
    try:
        with pytest.raises(DataError, match=r"a\.part cannot be written"):
            write(large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    comm.Barrier()
    assert [one.name for one in shared_tmp_path.iterdir()] == ["a"]
    again = DistMatrix.from_raw(path, (3, 3), grid, "m:x k") if kind == "raw" else DistMatrix.from_hdf5(path, "a", grid, "m:x k")
    assert again.sum() == 9


@pytest.mark.mpi(sizes=(2,))
def test_hdf5_without_h5py_names_the_extra(comm, make_grid, shared_tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "h5py", None)
    grid = make_grid(x=2)
    (shared_tmp_path / f"{comm.rank}").touch()
    with pytest.raises(ConfigError, match=r"pip install 'summa3d\[hdf5\]'"):
        DistMatrix.from_hdf5(shared_tmp_path / f"{comm.rank}", "a", grid, "m:x k")
    with pytest.raises(ConfigError, match=r"pip install 'summa3d\[hdf5\]'"):
        DistMatrix.ones((3, 3), grid, "m:x k").to_hdf5(shared_tmp_path / "a", "a")
