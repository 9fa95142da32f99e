# Ownership as data: which grid axes split which dim of a tensor. May import comm.
# Next: layout.py (pure functions), then distribute.py (global array ↔ blocks), redistribute.py (any ownership ↔ any other).
from .cyclic import BlockCyclic
from .distribute import collect, distribute
from .layout import Layout, Sharding, split_sizes
from .redistribute import Redistribution, redistribute

__all__ = ["BlockCyclic", "Layout", "Redistribution", "Sharding", "collect", "distribute", "redistribute", "split_sizes"]
