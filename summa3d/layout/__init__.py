"""Who holds what of a tensor: layouts, global arrays ↔ blocks, and redistribution from any ownership to any other."""

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
