"""The errors that users see.

They are raised on every rank alike, before any communication. The message says what happened, with which values, and what would
work.
"""

import difflib
import re
from collections.abc import Sequence

__all__ = [
    "AgreementError",
    "CapacityError",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "DataError",
    "GridError",
    "LaunchError",
    "LayoutError",
    "ShapeError",
    "Summa3dError",
]


LONG_WORD = re.compile(r"\S{1000,}")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal obeys instead of showing them, and halves of a surrogate pair, which no file can hold."""
LONGEST_MESSAGE = 4000
LONGEST_KEY = 100
"""Characters of a key that are compared with known ones."""


def printable(text: str) -> str:
    """A text whose control characters, but for line breaks and tabs, are written out.

    >>> print(printable("\\x1b[2J and \\x07"))
    \\x1b[2J and \\x07
    """
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shortened(message: str) -> str:
    """A message in which values that fill pages are cut, which fills none itself, and has control characters written out.

    >>> shortened("x is " + 5000 * "1")[-51:]
    '111111111111…11111111111111111111 (5000 characters)'
    """
    message = printable(message)
    message = LONG_WORD.sub(lambda match: f"{match[0][:60]}…{match[0][-20:]} ({len(match[0])} characters)", message)
    if len(message) <= LONGEST_MESSAGE:
        return message
    half = LONGEST_MESSAGE // 2
    return f"{message[:half]} … {message[-half:]} ({len(message)} characters)"


class Summa3dError(Exception):
    """Base of all errors that a user can cause and correct; the command line prints the message without a traceback.

    Values that fill pages are shortened in the message, and what a terminal would obey is escaped.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


class GridError(Summa3dError):
    """A process grid does not fit the number of ranks, or has no such axis."""


class LayoutError(Summa3dError):
    """A tensor dim cannot be split over the requested grid axes."""


class ShapeError(Summa3dError):
    """An array has another shape or dtype than the block that an operation expects."""


class AgreementError(Summa3dError):
    """Ranks called different collectives, or one with different shapes, dtypes, reductions or roots."""


class ConfigError(Summa3dError):
    """A configuration key, option or value cannot be used."""


class ClusterError(Summa3dError):
    """A description of a cluster is unknown, incomplete, or holds a number that cannot be."""


class DataError(Summa3dError):
    """A corpus or token file is missing, empty or damaged, or a token or label lies outside the vocabulary."""


class CheckpointError(Summa3dError):
    """A checkpoint is incomplete, altered, or of another model."""


class CapacityError(Summa3dError):
    """A host or a device ran out of memory, or an operation would need more than it has."""


class LaunchError(Summa3dError):
    """No launcher fits the MPI library of the running interpreter, or another MPI's launcher started the ranks."""


def nearest(key: str, known: Sequence[str]) -> str:
    """The known key that is most similar to `key`: as a whole, in its last part, or by its initials, in any case of letters.

    >>> nearest("lr", ["train.learning_rate", "train.steps"])
    'train.learning_rate'
    >>> nearest("fsd", ["1-D", "FSDP", "cuboid"])
    'FSDP'
    """
    key = key[:LONGEST_KEY].lower()

    def likeness(candidate: str) -> float:
        candidate = candidate.lower()
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        part, name = key.rpartition(".")[2], candidate.rpartition(".")[2]
        initials = "".join(word[:1] for word in name.split("_"))
        last = difflib.SequenceMatcher(None, part, name).ratio()
        return max(whole, last, len(part) > 1 and part == initials) + whole / 100

    return max(known, key=likeness)
