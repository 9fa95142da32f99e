"""Which BLAS is taken, and that each multiplies alike: forms, strides, orders, α and β, small sizes and large ones."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from summa3d import blas_library
from summa3d.errors import ConfigError
from summa3d.gemm.local.blas import accumulate
from summa3d.gemm.local.multiply import multiply


def numpys_file() -> Path | None:
    """The OpenBLAS file of numpy's wheel."""
    return next(iter(Path(np.__file__).parent.parent.glob("numpy.libs/lib*openblas*.so*")), None)


@pytest.fixture
def taken(monkeypatch):
    """A function: the library that SUMMA3D_BLAS = `name` leads to (None: unset), used by every product until the test ends."""

    def take(name):
        blas_library.library.cache_clear()
        blas_library.gemm.cache_clear()
        monkeypatch.delenv(blas_library.VARIABLE, raising=False) if name is None else monkeypatch.setenv(
            blas_library.VARIABLE, name
        )
        return blas_library.library()

    yield take
    blas_library.library.cache_clear()
    blas_library.gemm.cache_clear()


def offered():
    names = ["numpy"]
    if blas_library._mkl_file() is not None:
        names.append("mkl")
    return names + ([str(numpys_file())] if numpys_file() else [])


@pytest.mark.parametrize("name", offered(), ids=lambda name: Path(name).name.split("-")[0])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_every_library_multiplies_every_form_order_and_stride(taken, name, dtype):
    taken(name)
    random, real = np.random.default_rng(5), not dtype.startswith("complex")

    def matrix(rows, columns):
        values = random.standard_normal((rows, columns)) + (0 if real else 1j * random.standard_normal((rows, columns)))
        return values.astype(dtype)

    def stored(values, letter, order):
        """Return what op(`letter`) turns into `values`: by rows, by columns, or every row of a wider matrix."""
        turned = {"n": values, "t": values.T, "c": values.conj().T}[letter]
        if order == "strided":
            wide = np.zeros((turned.shape[0] * 2, turned.shape[1] + 3), dtype)
            wide[::2, 2:-1] = turned
            return wide[::2, 2:-1]
        return np.asarray(turned, order=order)

    unit = 2.0 ** (-24 if dtype in ("float32", "complex64") else -53)
    for m, n, k in ((5, 3, 7), (131, 137, 139)):  # below and above SMALL
        left, right, before = matrix(m, k), matrix(k, n), matrix(m, n)
        for form, orders in product(("nn", "nt", "tn", "tt", "cn", "nc"), (("C", "C"), ("F", "C"), ("C", "F"), ("strided", "F"))):
            a, b = stored(left, form[0], orders[0]), stored(right, form[1], orders[1])
            for alpha, beta in ((1, 0), (-2, 0), (1, 1), (0.5, -3)):
                out = np.full((m, n), np.nan, dtype) if beta == 0 else before.copy()
                accumulate(a, b, form, out, alpha, beta)
                want = alpha * (left @ right) + (beta * before if beta else 0)
                assert np.linalg.norm(out - want) <= 8 * unit * np.sqrt(k) * np.linalg.norm(np.abs(left) @ np.abs(right)), (
                    form,
                    orders,
                )
            assert (
                np.allclose(multiply(a, b, form), left @ right, atol=1e-3 if unit > 1e-10 else 1e-10) if "c" not in form else True
            )


def test_mkl_is_taken_where_it_is_installed_on_an_intel_processor(taken, monkeypatch, tmp_path):
    if blas_library._mkl_file() is None:
        pytest.skip("the extra mkl is not installed")
    monkeypatch.setattr(blas_library, "_has", lambda word: word == "GenuineIntel")
    assert taken(None).name.startswith("MKL 20")
    monkeypatch.setattr(blas_library, "_has", lambda word: word == "AuthenticAMD")
    assert taken(None).is_numpys
    assert "not Intel's" in taken(None).reason
    assert taken("mkl").name.startswith("MKL 20")
    monkeypatch.setattr(blas_library, "_folder", lambda: tmp_path)
    assert "not installed" in taken(None).reason
    with pytest.raises(ConfigError, match="there is no MKL in"):
        taken("mkl")


def test_a_library_that_cannot_be_loaded_or_has_no_products_is_an_error_that_names_it(taken, tmp_path):
    with pytest.raises(ConfigError, match=r"SUMMA3D_BLAS=.*nothing\.so cannot be loaded"):
        taken(str(tmp_path / "nothing.so"))
    with pytest.raises(ConfigError, match=r"SUMMA3D_BLAS=libc\.so\.6 has no cblas_dgemm"):
        taken("libc.so.6")


def test_a_named_library_is_the_one_that_multiplies(taken):
    file = numpys_file()
    if file is None:
        pytest.skip("numpy's BLAS is no file of its own here")
    found = taken(str(file))
    assert (found.name, found.reason, found.is_numpys) == (file.name, "SUMMA3D_BLAS names it", False)
    assert blas_library.gemm("float64") is not None
    assert blas_library.gemm("int32") is None


def test_mkl_gets_no_threads_whose_runtime_is_missing(monkeypatch):
    assert blas_library._mkl_layer({"OMP_NUM_THREADS": "1"}) == blas_library.SEQUENTIAL
    assert blas_library._mkl_layer({"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "4"}) == blas_library.SEQUENTIAL

    def refuse(*args, **kwargs):
        raise OSError("no such library")

    monkeypatch.setattr(blas_library.ctypes, "CDLL", refuse)
    assert blas_library._mkl_layer({"OMP_NUM_THREADS": "4"}) is None


@pytest.mark.parametrize("threads", ["1", "2", ""])
@pytest.mark.parametrize("order", ["torch first", "torch last"])
@pytest.mark.turns
def test_products_are_right_beside_torch_whichever_is_loaded_first(threads, order):
    pytest.importorskip("torch")
    load = "import torch; torch.ones(300, 300) @ torch.ones(300, 300)\n"
    multiply = (
        "import numpy as np\nfrom summa3d.gemm.local.multiply import multiply\n"
        "a = (np.arange(400 * 400) % 7).reshape(400, 400).astype('float64')\n"
        "assert np.array_equal(multiply(a, a, 'nn'), (a.astype(int) @ a.astype(int)))\n"
    )
    program = load + multiply if order == "torch first" else multiply + load + multiply
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environ |= {"OMP_NUM_THREADS": threads} if threads else {}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
