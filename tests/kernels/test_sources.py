"""The kernels' sources: compiled for every architecture without a warning or a spill.

Free of what NVRTC lacks, each text whole.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
import shutil
import subprocess
import sys

import pytest
from summa3d.kernels import load

FOLDER = load.SOURCES
ARCHITECTURES = (80, 90)
NO_SPILL = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"


@pytest.mark.parametrize(
    "architecture", [ARCHITECTURES[0], *(pytest.param(more, marks=pytest.mark.wide) for more in ARCHITECTURES[1:])]
)
@pytest.mark.parametrize("family", load.FAMILIES)
def test_a_family_compiles_without_warning_and_no_kernel_spills(tmp_path, architecture, family):
    """For the oldest architecture in `make test`: what that one has, the newer ones have."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    flags = ["-std=c++17", "-cubin", "-Werror", "all-warnings", "-Xptxas", "-v", f"-arch=sm_{architecture}"]
    command = [nvcc, *flags, str(FOLDER / f"{family}.cu"), "-o", str(tmp_path / "cubin")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = done.stdout
    assert done.returncode == 0, said
    kernels = re.findall(r"Compiling entry function '(\w+)' for 'sm_(\d+)'", said)
    assert {kernel for kernel, _ in kernels} == kernels_in(family) and {arch for _, arch in kernels} == {str(architecture)}
    frames = re.findall(r"(\w+)\n\s+(\d+ bytes stack frame.*)", said)
    assert len(frames) == len(kernels)
    assert [frame for frame in frames if frame[1] != NO_SPILL] == []


def kernels_in(family: str) -> set[str]:
    """The names that the family's macros make, by the host's preprocessor."""
    text = subprocess.run(
        ["g++", "-E", "-P", "-x", "c++", "-"], input=load.source(family), capture_output=True, text=True, check=True
    )
    return set(re.findall(r'extern "C" void (\w+)\(', text.stdout))


def test_every_kernel_is_found_in_its_own_family_and_every_file_is_one():
    assert {file.stem for file in FOLDER.glob("*.cu")} == set(load.FAMILIES)
    for family in load.FAMILIES:
        names = kernels_in(family)
        assert names and {load.family_of(name) for name in names} == {family}
    with pytest.raises(KeyError, match="no family of kernels has matmul_float32; the families are activation, "):
        load.family_of("matmul_float32")


def test_the_text_that_is_compiled_holds_its_headers_once_and_includes_nothing_on_a_device():
    for family in load.FAMILIES:
        text = load.source(family)
        assert text.count("#define SUMMA3D_FOR_EACH_DTYPE") == 1
        guarded = re.sub(r"#ifdef __CUDACC__.*?#else\n(.*?)#endif", "", text, count=1, flags=re.DOTALL)  # the host's headers
        assert re.findall(r"#\s*include\s+(\S+)", guarded) == []  # NVRTC has no include path to rely on
        assert "std::" not in text and "#pragma once" not in text


def test_files_of_kernels_say_what_lives_there_and_stay_short():
    for file in (*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")):
        lines = file.read_text(encoding="utf-8").splitlines()
        head = [line for line in lines[:4] if line.startswith("//")]
        assert head, file.name
        assert len(lines) <= 400 and max(map(len, lines)) <= 130, file.name


def test_a_device_tensor_without_cupy_says_what_to_install():
    program = (
        "import sys; sys.modules['cupy'] = None\n"
        "import torch; from summa3d.kernels import load\n"
        "try: load.fused(torch.device('cuda', 0))\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert "pip install 'summa3d[gpu]'" in done.stdout, done.stderr


def nvrtc() -> ctypes.CDLL | None:
    """The library that compiles on a user's machine: the one named by SUMMA3D_NVRTC, or the system's."""
    name = os.environ.get("SUMMA3D_NVRTC") or ctypes.util.find_library("nvrtc")
    return ctypes.CDLL(name) if name else None


@pytest.mark.parametrize("family", load.FAMILIES)
def test_nvrtc_compiles_the_very_text_that_is_given_to_it(family):
    library = nvrtc()
    if library is None:
        pytest.skip("no libnvrtc (SUMMA3D_NVRTC=FOLDER/libnvrtc.so.13 with LD_LIBRARY_PATH=FOLDER names one)")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = load.source(family).encode()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text, b"kernels.cu", 0, None, None) == 0
    options = [option.encode() for option in (*load.OPTIONS, "--gpu-architecture=sm_90")]
    status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    said = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, said)
    assert status == 0 and not said.value.strip(), said.value.decode()
