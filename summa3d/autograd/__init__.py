"""Gradients of distributed operations: products and collectives as torch autograd functions."""

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
