# Gradients of the distributed operations, as torch autograd functions. May import comm, layout, gemm; needs torch.
# Next: products.py (the products), matmul.py (the torch function), collectives.py (conjugate pairs).
from .collectives import all_gather, all_reduce, broadcast_from, reduce_scatter, scatter_from, sum_gradient
from .matmul import matmul
from .products import Product, product

__all__ = [
    "Product",
    "all_gather",
    "all_reduce",
    "broadcast_from",
    "matmul",
    "product",
    "reduce_scatter",
    "scatter_from",
    "sum_gradient",
]
