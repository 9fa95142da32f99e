# Ownership as data: which grid axes split which dim of a tensor. May import comm.
# Next: layout.py (pure functions), then distribute.py (global array ↔ blocks).
from .distribute import collect, distribute
from .layout import Layout, Sharding, split_sizes

__all__ = ["Layout", "Sharding", "collect", "distribute", "split_sizes"]
