# Process grids, collectives on their axes, and the ledger of what was moved. Imports numpy and mpi4py only.
# Next: grid.py, then collectives.py, transport.py.
from .grid import Axis, Grid
from .ledger import Ledger

__all__ = ["Axis", "Grid", "Ledger"]
