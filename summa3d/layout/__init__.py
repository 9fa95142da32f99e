"""Layouts of tensors: which rank holds which part, conversion between global arrays and blocks, and redistribution."""

from .cyclic import BlockCyclic, Ownership, ownership
from .distribute import collect, distribute
from .layout import Layout, Sharding, split_sizes
from .redistribute import Redistribution, redistribute

__all__ = [
    "BlockCyclic",
    "Layout",
    "Ownership",
    "Redistribution",
    "Sharding",
    "collect",
    "distribute",
    "ownership",
    "redistribute",
    "split_sizes",
]
