"""Reading of text, JSON and TOML that anybody may have written: what is none is a ValueError or an OSError, never a hang.

And writing of files in place of whatever has their names.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import DataError

LARGEST_WHOLE = 2**63 - 1
"""The largest whole number of TOML, and of an option of a command."""
DIGITS = len(str(LARGEST_WHOLE))
DEEPEST = 64
"""Levels of tables and lists in a file, beyond which code that follows them would end in Python's stack."""
HUGE = re.compile("[0-9]{309}")
"""Digits that may be a whole number beyond all floats."""

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def check_regular(path: Path) -> None:
    """Raise ValueError for a FIFO, a device or a file of /proc, which may let the one that reads it wait."""
    if os.path.realpath(path).startswith("/proc/"):
        raise ValueError(f"{path} is a file of /proc")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path} is no regular file")


def bytes_of(path: Path) -> bytes:
    """Contents of a regular file. Raises OSError, and ValueError for a FIFO or a device."""
    check_regular(path)
    return path.read_bytes()


def text_of(path: Path) -> str:
    """The text of a regular file. Raises OSError, and ValueError for a FIFO or a device, and for what is not UTF-8."""
    check_regular(path)
    return path.read_text(encoding="utf-8")


def named_text(file: Path) -> str:
    """The text of a file that a user has named. Raises DataError, which names it, where it is missing or cannot be read."""
    try:
        return text_of(file)
    except FileNotFoundError:
        raise DataError(f"There is no file {file}.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}.") from None


def from_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also where it is nested too deeply, or a number is too large."""
    digits = HUGE.search(text if isinstance(text, str) else text.decode("latin-1"))
    try:
        result = json.loads(text, parse_int=_whole_number if digits else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    braces = (b"{", b"[") if isinstance(text, bytes) else ("{", "[")
    return _not_too_deep(result) if sum(map(text.count, braces)) > DEEPEST else result  # type: ignore[arg-type]


def whole(text: str | bytes) -> int | None:
    """The whole number ≥ 0 that a text of decimal digits is; None for any other text, and beyond 2⁶³ − 1.

    >>> whole(" 12 "), whole("²"), whole("-1"), whole("9" * 5000)
    (12, None, None, None)
    """
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= DIGITS):
        return None
    value = int(digits)
    return value if value <= LARGEST_WHOLE else None


def pairs_of(text: str) -> dict[str, str] | None:
    """The names and values of a text NAME=VALUE,…; None for a text of another form, and where a name is given twice.

    >>> pairs_of("x=2, y=a=b"), pairs_of("x=2,x=2"), pairs_of("x:2"), pairs_of("")
    ({'x': '2', 'y': 'a=b'}, None, None, None)
    """
    parts = [part.partition("=") for part in text.split(",")]
    pairs = {name.strip(): value.strip() for name, equals, value in parts if name.strip() and equals}
    return pairs if len(pairs) == len(parts) else None


def grid_of(text: str) -> dict[str, int] | None:
    """The sizes of a grid's axes that a text AXIS=SIZE,… names; None for a text of another form.

    >>> grid_of("x=2, y=3"), grid_of("x=2,y=-1")
    ({'x': 2, 'y': 3}, None)
    """
    sizes = {axis: whole(size) for axis, size in (pairs_of(text) or {}).items()}
    known = {axis: size for axis, size in sizes.items() if size is not None}
    return known if known and len(known) == len(sizes) else None


def _whole_number(digits: str) -> int:
    """The number, which a float must be able to hold: it is compared with others."""
    value = int(digits)
    try:
        float(value)
    except OverflowError:
        raise ValueError(f"a whole number of {len(digits)} digits is too large") from None
    return value


def from_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text. Raises ValueError, also where it is nested too deeply for Python's stack."""
    try:
        return dict(_not_too_deep(tomllib.loads(text)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _not_too_deep(value: Any) -> Any:
    """The value of a file. Raises ValueError where its tables and lists have more than DEEPEST levels."""
    level, depth = [value], 0
    while level:
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list)))
        level, depth = [item for some in inner for item in some if isinstance(item, (dict, list))], depth + 1
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
    return value


def toml_value(text: str, otherwise: Any) -> Any:
    """The value that a text is in TOML; `otherwise` for a text that is none, or has lines after one."""
    try:
        table = from_toml(f"value = {text}")
    except ValueError:
        return otherwise
    return table["value"] if len(table) == 1 else otherwise


def titles(folder: Path) -> dict[str, str]:
    """The TOML files of a folder: name → what it is, its first line."""
    files = sorted(folder.glob("*.toml"))
    return {file.stem: file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for file in files}


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises OSError and ValueError as `text_of` and `from_json` do."""
    return from_json(text_of(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file. Raises OSError and ValueError as `text_of` and `from_toml` do."""
    return from_toml(text_of(path))


def check_no_link(path: Path) -> None:
    """Raise OSError where a path, to which the library is about to write, is a link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, through which nothing is written; remove it", str(path))


def no_follow(path: str, flags: int) -> int:
    """Open a file as `os.open` does, but no link. Raises OSError for one."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path` to be written, which in the end takes its place: readers see the old or the new one, whole.

    A FIFO, a device or a link of that name, into which a write would wait or go astray, is replaced. Raises OSError.
    """
    new = path.with_name(f".{os.urandom(6).hex()}-{path.name}")
    os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    try:
        if path.is_file() and not path.is_symlink():
            new.chmod(stat.S_IMODE(path.stat().st_mode))
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a file that a user has named, in place of the one of that name, whole; a FIFO or a device is written to.

    Names of files in it become the bytes that the file system has. Raises OSError.
    """
    special = f"{os.path.realpath(path.parent)}/"
    if special == "/dev/" or special.startswith("/proc/") or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        return
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8", errors="surrogateescape")


def remove_files(folder: Path, names: re.Pattern[str]) -> bool:
    """Remove the files of a folder that have these names, then the folder; whether it is gone. Raises OSError.

    What has other names stays, and the folder with it. Of a link, to a folder too, nothing but the link is removed.
    """
    if folder.is_symlink():
        folder.unlink()
        return True
    for file in folder.iterdir():
        if names.fullmatch(file.name) and (file.is_symlink() or not file.is_dir()):
            file.unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def rename_folder(new: Path, folder: Path, last: str) -> None:
    """Give a new folder its name; where a user keeps files under that name, move each file there, at the end the one `last`.

    Raises OSError.
    """
    try:
        os.rename(new, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        for file in sorted(new.iterdir(), key=lambda item: item.name == last):
            os.replace(file, folder / file.name)
        new.rmdir()
