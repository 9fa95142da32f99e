"""Build and installation of summa3d: ``pip install -e .[mpi,train,plot]``, or without `mpi` to use a cluster's own MPI.

The GPU and reference kernels in kernels/ are installed as the package summa3d.kernels.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "summa3d" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
README = HERE / "README.md"

# In 2.8.0 the edge of a graph does not keep the graph alive: recomputation fails; 2.5.0 crashes there.
TORCH = ["torch>=2.9"]
TOMLI = "tomli>=2.0; python_version < '3.11'"
PLOT = ["matplotlib>=3.8"]
TRAIN = [*TORCH, "safetensors>=0.4", "rich>=13", "tomli_w>=1.0"]
FRAME = ["pandas>=2"]  # `to_frame` of a dry run and of plans
FIT = ["scipy>=1.11"]  # of fits to papers' tables, in tests and papers/
MPI = ["mpich>=4.2"]
# Faster than the BLAS of numpy's wheels on Intel's processors; nothing elsewhere (summa3d/blas_library.py has the rule).
MKL = ["mkl>=2024.0; platform_machine == 'x86_64' and sys_platform == 'linux'"]
BF16 = ["ml_dtypes>=0.5"]  # the dtype bfloat16 for arrays of numpy and CuPy
NOTEBOOK = ["cloudpickle>=2.2"]  # `summa3d.launch` sends functions by it
HDF5 = ["h5py>=3.8"]  # `DistMatrix.from_hdf5`, `to_hdf5`
# The tests compare imported and exported models with those of transformers; the library reads and writes the files without it.
TRANSFORMERS = "transformers>=5.0; python_version >= '3.11'"
TEST = [*BF16, *FIT, *HDF5, *NOTEBOOK, "pytest>=8.2", "pytest-mpi>=0.6", "hypothesis>=6.100", TRANSFORMERS]
DOCS = ["zensical>=0.0.73", "mkdocstrings-python>=2.0"]  # `make docs`
COMPLETION = ["argcomplete>=3.5"]  # of the command line, in a shell
DEV = [*TEST, *COMPLETION, "mypy>=1.10", "ruff>=0.6"]

kernels = ["summa3d.kernels"] + [f"summa3d.kernels.{name}" for name in find_packages("kernels")]

setup(
    name="summa3d",
    version=VERSION.group(1) if VERSION else "0",
    description="Distributed matrix products and transformer training from Python over MPI, the same numbers on every grid",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="MPI, distributed linear algebra, tensor parallelism, transformers, SUMMA, 2.5D, 3D matrix multiplication",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Mathematics",
        "Typing :: Typed",
    ],
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[*find_packages(include=["summa3d", "summa3d.*"]), *kernels],
    package_dir={"summa3d": "summa3d", "summa3d.kernels": "kernels"},
    package_data={
        "summa3d": ["py.typed", "clusters/*.toml"],
        "summa3d.cli": ["help.json"],
        "summa3d.jobs": ["*.sh", "sites/*.toml"],
        "summa3d.nn": ["models.toml"],
        "summa3d.train": ["configs/*.toml"],
        "summa3d.sweep": ["files/*.toml", "files/published/*.toml"],
        "summa3d.plan": ["programs/*.toml"],
        "summa3d.kernels": ["*.cu", "*.cuh", "*/*.cu", "*/*.cuh"],
    },
    install_requires=["numpy>=1.26", "mpi4py>=4.0", "threadpoolctl>=3.2", TOMLI],
    extras_require={
        "torch": TORCH,
        "train": TRAIN,
        "bpe": ["tokenizers>=0.15"],
        "mpi": MPI,
        "mkl": MKL,
        "gpu": ["cupy-cuda13x>=14", *BF16],
        "gpu-cuda12": ["cupy-cuda12x>=13.4", *BF16],  # Volta too, which CUDA 13 has not
        "bf16": BF16,
        "plot": PLOT,
        "frame": FRAME,
        "hdf5": HDF5,
        "notebook": NOTEBOOK,
        "plan": [*TRAIN, *PLOT],
        "completion": COMPLETION,
        "test": TEST,
        "dev": DEV,
        "docs": DOCS,
    },
    entry_points={"console_scripts": ["summa3d = summa3d.__main__:main"]},
)
