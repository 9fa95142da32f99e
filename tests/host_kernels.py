"""The fused kernels without a GPU.

Their sources compiled as C++, block by block and thread by thread on the host; and a launcher that lays every operand
between guards, at any alignment.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from summa3d.kernels import load
from summa3d.kernels.launch import Argument, KernelLauncher
from torch import Tensor

# Misaligned 16-byte accesses, indices out of bounds and overflow end the process; nothing may warn.
CHECKS = "alignment,bounds,signed-integer-overflow,shift,integer-divide-by-zero"
HOST_FLAGS = (
    *("-x", "c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fno-strict-aliasing"),
    *(f"-fsanitize={CHECKS}", "-fsanitize-undefined-trap-on-error"),
)
GUARD = 64  # bytes on either side
MARK = 0xA5


def compiler() -> str | None:
    """The host's C++ compiler."""
    return shutil.which("g++") or shutil.which("c++")


def build(folder: Path) -> dict[str, ctypes.CDLL]:
    """The kernels of each family in a library, all compiled at once."""
    command = compiler()
    parts = []
    for family in load.FAMILIES:
        text, part = folder / f"{family}.cc", folder / f"{family}.so"
        text.write_text(load.source(family), encoding="utf-8")  # the text that the device's compiler is given
        parts.append((part, subprocess.Popen([str(command), *HOST_FLAGS, str(text), "-o", str(part)])))
    for _, process in parts:
        assert process.wait() == 0
    return {family: ctypes.CDLL(str(part)) for family, (part, _) in zip(load.FAMILIES, parts, strict=True)}


def built() -> dict[str, ctypes.CDLL]:
    """The kernels, compiled once for each state of their sources: whoever asks next on this machine finds them."""
    texts = "".join(load.source(family) for family in load.FAMILIES) + " ".join(HOST_FLAGS) + str(compiler())
    digest = hashlib.sha256(texts.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"summa3d-kernels-{os.getuid()}-{digest}"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that ask at once wait for the one that compiles
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                build(Path(temporary))
                shutil.copytree(temporary, f"{temporary}.done")
                os.rename(f"{temporary}.done", folder)
    return {family: ctypes.CDLL(str(folder / f"{family}.so")) for family in load.FAMILIES}


class HostLauncher:
    """Runs a kernel of the host build on CPU tensors."""

    device = torch.device("cpu")

    def __init__(self, libraries: dict[str, ctypes.CDLL], processors: int, most_blocks: int) -> None:
        self.libraries, self.processors, self.most_blocks = libraries, processors, most_blocks

    def __call__(self, kernel: str, blocks: int, threads: int, *arguments: Argument) -> None:
        assert threads % 32 == 0 and 0 < threads <= 256 and 0 < blocks <= self.most_blocks
        passed = [_passed(argument) for argument in arguments]
        getattr(self.libraries[load.family_of(kernel)], kernel)(ctypes.c_longlong(blocks), ctypes.c_int(threads), *passed)


def _passed(argument: Argument) -> ctypes._SimpleCData:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_longlong(argument)


class Guarded:
    """A launcher that gives kernels copies of all operands, `skip` elements off 16-byte alignment, between guards it looks after.

    Operands that share memory share a copy. What the kernel wrote is copied back.
    """

    def __init__(self, launch: KernelLauncher, skip: int) -> None:
        self.launch, self.skip = launch, skip
        self.device, self.processors, self.most_blocks = launch.device, launch.processors, launch.most_blocks

    def __call__(self, kernel: str, blocks: int, threads: int, *arguments: Argument) -> None:
        copies: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        for tensor in sorted(tensors, key=_span, reverse=True):
            if tensor.data_ptr() not in copies:
                copies[tensor.data_ptr()] = self._copied(tensor)
        given = [copies[argument.data_ptr()][1] if isinstance(argument, Tensor) else argument for argument in arguments]
        self.launch(kernel, blocks, threads, *given)
        for original, copy, room in copies.values():
            begin = copy.data_ptr() - room.data_ptr()
            outside = torch.cat((room[:begin], room[begin + copy.nbytes :]))
            assert bool((outside == MARK).all()), f"{kernel} wrote outside an operand"
            if not torch.equal(original.view(torch.uint8), copy.view(torch.uint8)):
                original.copy_(copy)  # what was only read stays untouched, as autograd watches it

    def _copied(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tensor's elements in one run, their copy, and the bytes around that."""
        run = tensor.detach().as_strided((_span(tensor),), (1,))
        room = torch.full((run.nbytes + 2 * GUARD + 16 + 16,), MARK, dtype=torch.uint8, device=tensor.device)
        begin = GUARD + -(room.data_ptr() + GUARD) % 16 + self.skip * tensor.itemsize
        copy = room[begin : begin + run.nbytes].view(tensor.dtype)
        copy.copy_(run)
        return run, copy, room


def _span(tensor: Tensor) -> int:
    """Elements from a tensor's first to its last in memory."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
