"""A Spack recipe: copy the folder into a repository of yours (`spack repo create`), then `spack install py-summa3d ^openmpi`.

MKL multiplies where SUMMA3D_BLAS names its libmkl_rt; else it is numpy's BLAS (`summa3d doctor` says which).
"""

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PySumma3d(PythonPackage):
    """Distributed matrix products and transformer training from Python over MPI."""

    git = "file:///path/to/summa3d"  # SITE: where the repository lies

    version("main", branch="main")

    license("Apache-2.0")

    variant("train", default=True, description="Layers, models and training: torch and what runs need")
    variant("bpe", default=False, description="Byte-pair encodings: data.tokenizer=bpe:N, and Transformers' tokenizers")
    variant("hdf5", default=False, description="Matrices in HDF5 files")
    variant("plot", default=False, description="Plots")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@68:", type="build")
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-mpi4py@4:", type=("build", "run"))
    depends_on("py-threadpoolctl@3.2:", type=("build", "run"))
    depends_on("py-torch@2.9:", type=("build", "run"), when="+train")
    depends_on("py-safetensors@0.4:", type=("build", "run"), when="+train")
    depends_on("py-rich@13:", type=("build", "run"), when="+train")
    depends_on("py-tomli-w@1:", type=("build", "run"), when="+train")
    depends_on("py-tomli@2:", type=("build", "run"), when="^python@:3.10")
    depends_on("py-tokenizers@0.15:", type=("build", "run"), when="+bpe")
    depends_on("py-h5py@3.8:", type=("build", "run"), when="+hdf5")
    depends_on("py-matplotlib@3.8:", type=("build", "run"), when="+plot")
