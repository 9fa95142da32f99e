# Gradients of the distributed operations, as torch autograd functions. May import comm, layout, gemm; needs torch.
# Next: matmul.py (the products), collectives.py (conjugate pairs).
from .collectives import all_gather, reduce_scatter, sum_gradient
from .matmul import Product, matmul

__all__ = ["Product", "all_gather", "matmul", "reduce_scatter", "sum_gradient"]
