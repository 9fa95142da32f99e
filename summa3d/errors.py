"""The errors that users see; every one is a `Summa3dError`."""

__all__ = [
    "AgreementError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "GridError",
    "LaunchError",
    "LayoutError",
    "ShapeError",
    "Summa3dError",
]


class Summa3dError(Exception):
    """Base of every error a user can cause and mend; the command line prints its message alone, without a traceback."""


class GridError(Summa3dError):
    """A process grid that does not fit the ranks, or an axis that it does not have."""


class LayoutError(Summa3dError):
    """A tensor dim that the grid axes asked for cannot split."""


class ShapeError(Summa3dError):
    """An array that is not the block, or not the dtype, that an operation expects."""


class AgreementError(Summa3dError):
    """Ranks that called a collective with different operations, shapes or dtypes (debug mode)."""


class ConfigError(Summa3dError):
    """A configuration key or value that cannot be used."""


class DataError(Summa3dError):
    """A corpus or token file that is missing, empty or damaged; a token or label that the model does not know."""


class CheckpointError(Summa3dError):
    """A checkpoint that is incomplete, altered, or of another model."""


class CapacityError(Summa3dError):
    """More memory than a host or a device has."""


class LaunchError(Summa3dError):
    """An MPI launcher that does not belong to the MPI library of the running interpreter."""
