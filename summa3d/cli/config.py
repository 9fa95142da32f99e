"""`summa3d config`: the keys of a configuration with type, default and meaning; configuration files with comments. Uses no MPI.

Keys, types and defaults are the fields of the dataclasses; their meaning stands in the docstrings.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ..errors import ConfigError
from ..nn.config import named_models
from ..train import config as configuration
from ..train import toml

SECTION = re.compile(r"\n *(?:Attributes|Parameters)\n *-+\n(.*?)(?:\n\n|\Z)", re.DOTALL)
WIDTH = 110


@dataclass(frozen=True)
class ConfigKey:
    """A key of the configuration: its dotted name, the words for its type, its default as TOML, and its meaning."""

    name: str
    kind: str
    default: str
    meaning: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `summa3d config` to `parser`."""
    parser.add_argument(
        "what",
        nargs="?",
        metavar="KEY|CONFIG",
        help="Show this key (train.steps), the keys of this table (train), or this configuration: a shipped one, a model's, or a "
        "TOML file.",
    )
    parser.add_argument(
        "--toml", action="store_true", help="Print a configuration file: every key as a comment, with default and meaning."
    )


def run(args: argparse.Namespace) -> int:
    """Print what is asked for; returns the exit status. Raises ConfigError for an unknown key or configuration."""
    shipped, models, what = configuration.shipped(), named_models(), args.what or ""
    if what in (*shipped, *models) or what.endswith(".toml"):
        configuration.load(what)  # raises an error for a file that no run can take
        print(commented(configuration.read_table(what)), end="")
        return 0
    shown = [key for key in keys() if what == key.name or (_is_shown(key) and (not what or key.name.startswith(f"{what}.")))]
    if not shown:
        shown = [key for key in keys() if what and _is_shown(key) and key.name.rpartition(".")[2] == what]
    if not shown:
        known = [*(key.name for key in keys() if _is_shown(key)), *shipped, *models]
        raise ConfigError(f"There is no key, table or configuration {what!r}. The nearest is {toml.nearest_key(what, known)!r}.")
    if args.toml:
        print(commented({}), end="")
        return 0
    print("\n".join(_as_text(shown)))
    if not what:
        print("\nConfigurations that are shipped, for `summa3d train NAME` and `summa3d config NAME`:")
        print("\n".join(f"  {name:<12} {title}" for name, title in shipped.items()))
        print("Models, whose configurations have no corpus:")
        print(textwrap.fill(", ".join(models), WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))
    return 0


def _is_shown(key: ConfigKey) -> bool:
    """Return whether a user may set the key to something."""
    return key.name not in configuration.HIDDEN


def keys(cls: Any = configuration.Config, prefix: str = "") -> Iterator[ConfigKey]:
    """Every key of the configuration, tables after the keys that stand beside them."""
    meanings, kinds, tables = _meanings(cls), toml.field_types(cls), []
    for field in fields(cls):
        kind = kinds[field.name]
        if is_dataclass(kind):
            tables.append((kind, f"{prefix}{field.name}."))
        else:
            name = prefix + field.name
            default = "none" if name in configuration.SIZES else _as_toml(field.default)  # train chooses a grid then
            yield ConfigKey(name, toml.describe(kind) + ", or none" * (default == "none"), default, meanings[field.name])
    for kind, name in tables:
        yield from keys(kind, name)


def _meanings(cls: type) -> dict[str, str]:
    """Field name → what the class's docstring says of it; fields that stand together share it."""
    result: dict[str, str] = {}
    section = SECTION.search(cls.__doc__ or "")
    entries = re.split(r"\n(?=\S)", textwrap.dedent(section[1])) if section else []
    for entry in entries:
        names, _, meaning = " ".join(entry.split()).partition(" : ")
        result |= dict.fromkeys(names.split(", "), meaning)
    return result


def _as_toml(value: object) -> str:
    """A value as TOML writes it; a key that has none is left out of files."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_as_toml(item)}" for key, item in value.items()) + "}"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)  # TOML's own form of all other values of keys


def _as_text(keys: list[ConfigKey]) -> Iterator[str]:
    for key in keys:
        yield f"{key.name} = {key.default}   ({key.kind})"
        yield textwrap.fill(key.meaning, WIDTH, initial_indent="    ", subsequent_indent="    ")


def commented(given: Mapping[str, Any]) -> str:
    """A configuration file of the keys in a TOML table, with the meaning of every key; the others are comments with defaults."""
    lines: list[str] = []
    table = ""
    for key in keys():
        before, _, name = key.name.rpartition(".")
        if not _is_shown(key) and name not in (given.get(before, {}) if before else given):
            continue
        if before != table:
            lines.append(f"\n[{before}]")
            table = before
        values = given.get(before, {}) if before else given
        lines += textwrap.wrap(key.meaning, WIDTH, initial_indent="# ", subsequent_indent="# ")
        unset = f"# {name} =  # {key.kind}" if key.default == "none" else f"# {name} = {key.default}"
        lines.append(f"{name} = {_as_toml(values[name])}" if name in values else unset)
    return "\n".join(lines) + "\n"
