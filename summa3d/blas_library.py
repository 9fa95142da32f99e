"""The BLAS that multiplies blocks on the host: numpy's own, MKL where it is installed, a named one, or for tensors torch's."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .dtypes import LETTERS
from .errors import ConfigError

VARIABLE = "SUMMA3D_BLAS"
TAKES = "Give numpy, mkl, torch, or the file of a BLAS."
BLAS_OVERRIDES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables that make OpenBLAS choose the kernels of another processor."""
ROW_MAJOR, LOWER, TRANSPOSE = 101, 122, {"n": 111, "t": 112, "c": 113}
NAMES = ("scipy_cblas_{}gemm64_", "cblas_{}gemm64_", "cblas_{}gemm_64", "cblas_{}gemm")
"""Names of gemm in the BLAS of numpy's wheels, of distributions with 64-bit integers, in MKL, and in all others."""
SEQUENTIAL, GNU_THREADS = 1, 3  # MKL's threading layers
CHECKED = 256  # side of a product that a library spreads over its threads

OPENBLAS_NAMES = (("scipy_openblas_", "64_"), ("openblas_", "64_"), ("scipy_openblas_", ""), ("openblas_", ""))
"""What stands before and after the names of OpenBLAS's own functions, in numpy's wheels and elsewhere."""

Gemm = Callable[[np.ndarray, np.ndarray, str, np.ndarray, complex, complex], None]
Rank_k = Callable[[np.ndarray, str, np.ndarray], None]
AtAddresses = Callable[..., None]
"""gemm(form, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc) of real matrices by rows, at these addresses."""


@dataclass(frozen=True)
class Library:
    """A BLAS: its name, the reason of its choice, and its ctypes handle (None where ctypes cannot reach numpy's own)."""

    name: str
    reason: str
    handle: Any

    @property
    def is_numpys(self) -> bool:
        """Return whether this is the BLAS that numpy is linked to."""
        return self.name == "numpy's"

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@cache
def library() -> Library:
    """The BLAS of this process, chosen at the first call.

    SUMMA3D_BLAS names the library: `numpy`, `mkl`, or the name or path of a library with the C interface (CBLAS); with `torch`,
    which multiplies tensors alone, it is numpy's. Without the variable, MKL is chosen on an Intel processor where MKL is
    installed beside this interpreter (by the extra `mkl` or by conda), else numpy's BLAS.

    Raises ConfigError for a library that cannot be loaded or computes a wrong product.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted in ("numpy", "torch"):
        return _numpys(f"{VARIABLE}={wanted}")
    if wanted and wanted != "mkl":
        return _named(wanted)
    file = _mkl_file()
    if wanted == "mkl" and file is None:
        raise ConfigError(
            f"{VARIABLE}=mkl, but there is no MKL in {_folder()}: pip install 'summa3d[mkl]', or name its libmkl_rt.so."
        )
    if file is None:
        return _numpys("the extra mkl, faster on Intel's processors, is not installed")
    if not wanted and not _has("GenuineIntel"):
        return _numpys(f"the processor is not Intel's; {VARIABLE}=mkl takes the MKL that is installed")
    result = _mkl(file, f"{VARIABLE}=mkl" if wanted else "installed here, and the processor is Intel's")
    if result is None or _checked(result.handle, "float64") is None:
        if wanted:
            raise ConfigError(f"{VARIABLE}=mkl, but {file} cannot be used: its OpenMP runtime is missing, or a product is wrong.")
        return _numpys("MKL is installed but cannot be used")
    return result


class BlasRule(NamedTuple):
    """What multiplies torch's host tensors.

    name : "torch", or the library with its version. reason : why. worth : m·n·k from which the library multiplies, by dtype;
    below it, and for other dtypes, torch does. least : the fewest rows and columns of C that it takes.
    """

    name: str
    reason: str
    worth: dict[str, int]
    least: int = 0


TORCH = "torch"
EVERY_SIZE = {"float32": 96**3, "float64": 96**3}
"""m·n·k from which a call of the library is worth its preparation, where it is much the faster."""
ZEN_4 = {"float32": 512**3, "float64": 128**3}, 64
"""`worth` and `least` on Zen 4, whose units for AVX-512 are no wider than those for AVX2: where OpenBLAS is never the slower."""


@cache
def rule_for_tensors() -> BlasRule:
    """Library that would multiply torch's host tensors in this process; the ranks of a grid agree on one (`Job.blas`).

    By numpy's OpenBLAS on AMD's processors with AVX-512, which torch's MKL does not use there. On Zen 5 that makes MKL less than
    half as fast (float32, a core: 110 against 250 Gflop/s), on Zen 4 4 to 30 % slower in large products and as fast in small ones
    (bench/local_blas.py). Elsewhere by torch itself. SUMMA3D_BLAS decides otherwise: `torch`, or the library that it names.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted == TORCH:
        return BlasRule(TORCH, f"{VARIABLE}={TORCH}", {})
    if wanted:
        return BlasRule(library_name(), f"{VARIABLE}={wanted}", EVERY_SIZE, 2)
    if not (_has("AuthenticAMD") and _has("avx512f")):
        return BlasRule(TORCH, "numpy's BLAS is known to be faster only on AMD's processors with AVX-512", {})
    if _openblas(library().handle) is None or gemm("float32") is None:
        return BlasRule(TORCH, "numpy's BLAS is not an OpenBLAS that can be called", {})
    reason = "torch's MKL does not use AVX-512 on AMD's processors"
    return BlasRule(library_name(), reason, *(ZEN_4 if _family() == 25 else (EVERY_SIZE, 2)))


def common_rule(rules: Sequence[BlasRule]) -> BlasRule:
    """The rule of all ranks, from what each would take: the first rank's where all name one library, else torch."""
    names = list(dict.fromkeys(rule.name for rule in rules))
    return rules[0] if len(names) == 1 else BlasRule(TORCH, f"the ranks would take different ones: {', '.join(names)}", {})


def library_name() -> str:
    """The library's name, and OpenBLAS's version and the processor whose kernels it takes: all that its last bits depend on."""
    taken = library()
    return " ".join(filter(None, (taken.name, _openblas(taken.handle))))


def _openblas(handle: Any) -> str | None:
    """OpenBLAS's version and the processor whose kernels it takes; None for another BLAS."""
    config, core = _said(handle, "get_config"), _said(handle, "get_corename")
    return None if config is None or core is None else f"OpenBLAS {config.split()[1]} {core}"


def numpys_core_type() -> str | None:
    """The processor whose kernels numpy's OpenBLAS takes, chosen at run time; None where numpy has another BLAS."""
    return _said(_numpys("").handle, "get_corename")


def _said(handle: Any, name: str) -> str | None:
    """The text that OpenBLAS's own function of this name returns; None for another BLAS."""
    ask = _own(handle, name)
    if ask is None:
        return None
    ask.restype = ctypes.c_char_p
    answer: bytes = ask()
    return answer.decode()


def _own(handle: Any, name: str) -> Any:
    """OpenBLAS's own function of this name; None for another BLAS."""
    names = [f"{before}{name}{after}" for before, after in OPENBLAS_NAMES]
    return next((function for name in names if (function := getattr(handle, name, None)) is not None), None)


def follow_threads(count: int) -> None:
    """Have the library multiply with `count` threads, as torch does, where it is OpenBLAS or MKL."""
    threads, set_threads = _thread_count()
    if threads is not None and threads() != count:
        set_threads(count)


@cache
def _thread_count() -> tuple[Any, Any]:
    """The library's functions that return and set how many threads it multiplies with; None twice where it has none."""
    handle = library().handle
    if hasattr(handle, "MKL_Set_Num_Threads"):
        return handle.MKL_Get_Max_Threads, handle.MKL_Set_Num_Threads
    return _own(handle, "get_num_threads"), _own(handle, "set_num_threads")


@cache
def gemm(dtype: str) -> Gemm | None:
    """The function C = α·op(A)·op(B) + β·C of this process's BLAS for a dtype; None where it lacks one or computes wrongly."""
    handle = library().handle
    return None if handle is None or dtype not in LETTERS else _checked(handle, dtype)


@cache
def rank_k(dtype: str, form: str) -> Rank_k | None:
    """The function that makes the lower triangle of C = op(A)·op'(A), form nt, tn, nc or cn: syrk, or herk for conjugates.

    None where this process's BLAS lacks it or computes wrongly.
    """
    handle, is_complex = library().handle, dtype.startswith("complex")
    if gemm(dtype) is None:
        return None
    kind = "herk" if "c" in form and is_complex else "syrk"
    try:
        bound = _rank_k_bound(handle, dtype, kind)
    except AttributeError:
        return None
    for side in (3, 2 * CHECKED // 3):
        a = (np.arange(side * 9) % 7).astype(dtype).reshape(side, 9)[:, :5]
        a = (a - 1j * np.roll(a, 1)).astype(dtype) if is_complex else a.copy()
        want = a @ (a.conj().T if kind == "herk" else a.T) if form[0] == "n" else (a.conj().T if kind == "herk" else a.T) @ a
        out = np.zeros_like(want)
        bound(a, form, out)
        if not np.array_equal(np.tril(out), np.tril(want)):
            return None
    return bound


def _named(wanted: str) -> Library:
    try:
        handle = _mkl(Path(wanted), f"{VARIABLE} names it") if "mkl_rt" in Path(wanted).name else None
        result = handle or Library(Path(wanted).name, f"{VARIABLE} names it", ctypes.CDLL(wanted))
    except OSError as error:
        raise ConfigError(f"{VARIABLE}={wanted} cannot be loaded: {error}.\n  {TAKES}") from None
    if _checked(result.handle, "float64") is None:
        raise ConfigError(f"{VARIABLE}={wanted} has no cblas_dgemm that computes correct products.\n  {TAKES}")
    return result


def _numpys(reason: str) -> Library:
    """numpy's BLAS, through numpy's extension module, whose symbols include those of the BLAS that it is linked to."""
    core: Any = getattr(np, "_core", None) or np.core
    try:
        handle: Any = ctypes.CDLL(core._multiarray_umath.__file__)
    except OSError:
        handle = None
    return Library("numpy's", reason, handle)


def _folder() -> Path:
    return Path(sys.prefix) / "lib"


def _mkl_file() -> Path | None:
    return next(iter(sorted(_folder().glob("libmkl_rt.so*"), reverse=True)), None)


def _mkl(file: Path, reason: str) -> Library | None:
    """MKL with the threading layer of `_mkl_layer`; None without GNU's OpenMP runtime, where MKL would end the process."""
    handle = ctypes.CDLL(str(file))
    layer = _mkl_layer()
    if layer is None:
        return None
    handle.MKL_Set_Threading_Layer(layer)
    text = ctypes.create_string_buffer(200)
    handle.MKL_Get_Version_String(text, 200)
    words = text.value.decode().split()
    version = next((word.removesuffix("-Product") for word in words if word[:1].isdigit()), "")
    return Library(f"MKL {version}".strip(), reason, handle)


def _mkl_layer(environ: Mapping[str, str] = os.environ) -> int | None:
    """MKL's threading layer: sequential for one thread, else GNU's OpenMP; None without GNU's runtime.

    With Intel's OpenMP runtime, products are wrong beside torch, which loads GNU's.
    """
    if (environ.get("MKL_NUM_THREADS") or environ.get("OMP_NUM_THREADS")) == "1":
        return SEQUENTIAL
    try:
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    return GNU_THREADS


def _family() -> int | None:
    """The processor's family: of AMD's with AVX-512, 25 is Zen 4 and 26 is Zen 5."""
    line = re.search(r"cpu family\s*:\s*(\d+)", _processor())
    return int(line[1]) if line else None


def _has(word: str) -> bool:
    """Return whether the processor's vendor, or one of the features that it reports, is `word`."""
    return word in _processor().split()


@cache
def _processor() -> str:
    """The kernel's description of the first processor; of all others it says the same."""
    facts = Path("/proc/cpuinfo")
    return facts.read_text().partition("\n\n")[0] if facts.exists() else ""


def _checked(handle: Any, dtype: str) -> Gemm | None:
    """The library's gemm for a dtype; None where it lacks one, pointers are not 8 bytes wide, or a product is wrong."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        bound = _bound(handle, dtype)
    except AttributeError:
        return None
    a, b, out = (np.arange(rows * 9, dtype=dtype).reshape(rows, 9) for rows in (3, 2, 3))
    a, b, out = a[:, :4], b[:, :4], out[:, :2].copy()
    want = 2 * (a @ b.T) + 3 * out
    bound(a, b, "nt", out, 2, 3)
    large = (np.arange(CHECKED * CHECKED) % 7).astype(dtype).reshape(CHECKED, CHECKED)  # whole numbers: exact in any order
    square = np.empty_like(large)
    bound(large, large, "nn", square, 1, 0)
    return bound if np.array_equal(out, want) and np.array_equal(square, large @ large) else None


@cache
def at_addresses(dtype: str) -> AtAddresses | None:
    """`gemm` for float32 or float64 as a function of addresses; None where `gemm` is."""
    if gemm(dtype) is None:
        return None
    function = _function(library().handle, dtype)

    def multiply(form: str, *arguments: float) -> None:
        function(ROW_MAJOR, TRANSPOSE[form[0]], TRANSPOSE[form[1]], *arguments)

    return multiply


def _found(library: Any, dtype: str, routine: str) -> Any:
    """A routine of the C interface."""
    names = [name.format(LETTERS[dtype]).replace("gemm", routine) for name in NAMES]
    return next(getattr(library, name) for name in [*filter(lambda name: hasattr(library, name), names), names[-1]])


def _rank_k_bound(library: Any, dtype: str, kind: str) -> Rank_k:
    """syrk or herk of a library, as `rank_k` returns it."""
    function, is_complex = _found(library, dtype, kind), dtype.startswith("complex")
    enum, number, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    real = ctypes.c_float if dtype in ("float32", "complex64") else ctypes.c_double
    by_pointer = is_complex and kind == "syrk"
    scalar = pointer if by_pointer else real
    function.restype = None
    function.argtypes = (enum, enum, enum, number, number, scalar, pointer, number, scalar, pointer, number)

    def multiply(a: np.ndarray, form: str, out: np.ndarray) -> None:
        factors = np.array((1, 0), dtype)
        first = address(factors)
        alpha, beta = (first, first + factors.itemsize) if by_pointer else (1.0, 0.0)
        turn = "n" if form[0] == "n" else "c" if kind == "herk" else "t"
        n, k = a.shape if turn == "n" else a.shape[::-1]
        operand, target = (address(a), leading(a)), (address(out), leading(out))
        function(ROW_MAJOR, LOWER, TRANSPOSE[turn], n, k, alpha, *operand, beta, *target)

    return multiply


def _function(library: Any, dtype: str) -> Any:
    """gemm of the C interface, with the types of its arguments."""
    function = _found(library, dtype, "gemm")
    # 64-bit integers fit both kinds of BLAS: on these platforms a 32-bit callee reads the low half of each argument.
    enum, number, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    scalar = pointer if dtype.startswith("complex") else ctypes.c_float if dtype == "float32" else ctypes.c_double
    operand = (pointer, number)
    function.restype = None
    function.argtypes = (enum, enum, enum, number, number, number, scalar, *operand, *operand, scalar, *operand)
    return function


def _bound(library: Any, dtype: str) -> Gemm:
    function, is_complex = _function(library, dtype), dtype.startswith("complex")

    def gemm(a: np.ndarray, b: np.ndarray, form: str, out: np.ndarray, alpha: complex, beta: complex) -> None:
        if not out.flags.writeable:  # the library gets an address only and cannot check
            raise ValueError("output array is read-only")
        m, n = out.shape
        k = a.shape[1] if form[0] == "n" else a.shape[0]
        factors = np.array((alpha, beta), dtype)
        first = address(factors)
        scalars = (first, first + factors.itemsize) if is_complex else (alpha, beta)
        function(
            ROW_MAJOR, TRANSPOSE[form[0]], TRANSPOSE[form[1]], m, n, k,
            scalars[0], address(a), leading(a), address(b), leading(b), scalars[1], address(out), leading(out),
        )  # fmt: skip

    return gemm


def address(array: np.ndarray) -> int:
    """The address of the first element (`array.ctypes.data` is the same, but takes ten times as long)."""
    return int(array.__array_interface__["data"][0])


def leading(array: np.ndarray) -> int:
    """The leading dimension: elements from one row to the next.

    >>> leading(np.zeros((3, 4))), leading(np.zeros((3, 4))[:, :2])
    (4, 4)
    """
    return int(array.strides[0] // array.itemsize) if array.shape[0] > 1 else max(1, int(array.shape[1]))
