# The fused kernels as a fixture: of the host build, or with SUMMA3D_DEVICE=cuda of the real device. May import summa3d.kernels.
# Next: ../host_kernels.py; test_elements.py.
from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import host_kernels
import pytest
import torch
from summa3d.kernels import load
from summa3d.kernels.rows import Fused

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# (processors, most blocks, elements off alignment): a grid that covers everything at once, aligned; a small one whose blocks
# take several tiles or rows each, misaligned by one element and by three.
WAYS = {"aligned": (4, 1 << 20, 0), "few-blocks-odd": (1, 3, 1), "few-blocks-by-three": (1, 2, 3)}


@pytest.fixture(scope="session")
def libraries() -> Iterator[Any]:
    if os.environ.get("SUMMA3D_DEVICE") == "cuda":
        yield None
        return
    if host_kernels.compiler() is None:
        pytest.skip("no C++ compiler")
    yield host_kernels.built()


@pytest.fixture(params=list(WAYS))
def fused(request: pytest.FixtureRequest, libraries: Any) -> Fused:
    """Every kernel, its operands between guards."""
    processors, most_blocks, skip = WAYS[request.param]
    if libraries is None:
        launch: Any = load.CudaLauncher(torch.device("cuda", 0))
        launch.processors, launch.most_blocks = processors, most_blocks
    else:
        launch = host_kernels.HostLauncher(libraries, processors, most_blocks)
    return Fused(host_kernels.Guarded(launch, skip))


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
