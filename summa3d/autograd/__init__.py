"""Gradients of distributed operations: products and collectives as torch autograd functions."""

from .collectives import all_gather, all_reduce, broadcast_from, reduce_scatter, scatter_from, sum_gradient
from .differentiable import Product, product
from .einsum import EinsumProduct, einsum
from .matmul import matmul

__all__ = [
    "EinsumProduct",
    "Product",
    "all_gather",
    "all_reduce",
    "broadcast_from",
    "einsum",
    "matmul",
    "product",
    "reduce_scatter",
    "scatter_from",
    "sum_gradient",
]
