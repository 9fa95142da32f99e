"""Conversion of TOML tables to frozen dataclasses and back, with checks of types and suggestions for unknown keys."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from ..errors import ConfigError, nearest
from ..files import LARGEST_WHOLE, toml_value

Settings = TypeVar("Settings")
type_hints = cache(typing.get_type_hints)
"""Each class's once: one configuration asks for those of its tables dozens of times."""
ELSEWHERE = {
    "grid.y": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size mp_size",
    "grid.pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size",
    "grid.cp": "context_parallel context_parallel_size cp_size",
    "grid.ep": "expert_parallel expert_model_parallel_size ep_size",
    "grid.dp": "data_parallel data_parallel_size dp_size",
    "replicas.zero": "zero_stage zero_optimization use_distributed_optimizer fsdp",
    "recompute": "activation_checkpointing gradient_checkpointing activation_checkpoint recompute_granularity",
    "train.accumulate": "gradient_accumulation gradient_accumulation_steps grad_accum micro_batch_size num_micro_batches",
    "train.batch": "batch_size global_batch_size train_batch_size",
    "train.steps": "max_iters max_steps train_iters num_steps",
    "train.warmup": "warmup_steps warmup_iters lr_warmup_iters",
    "train.checkpoint_every": "save_interval save_steps",
    "model.layers": "n_layer num_layers num_hidden_layers",
    "model.heads": "n_head num_heads num_attention_heads",
    "model.hidden": "n_embd d_model hidden_size dim",
    "model.sequence": "seq_length seq_len block_size max_seq_len n_positions",
    "model.vocabulary": "vocab_size vocab",
    "dtype": "bf16 fp16 precision mixed_precision",
}
"""Key → what other libraries call it, which an error for an unknown key knows; docs/coming-from.md has their whole tables."""


def build(cls: type[Settings], table: Mapping[str, Any], prefix: str = "", known: Sequence[str] = ()) -> Settings:
    """An instance of the dataclass `cls` from a TOML table. Nested dataclasses are nested tables.

    Parameters
    ----------
    prefix : prefix of all keys in error messages, as "model."
    known : known keys, from which an error for an unknown key suggests the nearest; default: the keys of `cls`

    Raises ConfigError for an unknown key, and for a value of another type than the field has.
    """
    hints, known = field_types(cls), known or list(leaves(cls))
    values: dict[str, Any] = {}
    for name, value in table.items():
        key = prefix + name
        if name not in hints:
            raise unknown_key(key, known, removed_of(cls).get(name))
        if is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{key} = {value!r} is a value; {key} is a table. Its keys: {', '.join(leaves(hints[name], key + '.'))}."
                )
            values[name] = build(typing.cast(type, hints[name]), value, key + ".", known)
        else:
            values[name] = convert(key, value, hints[name])
    return cls(**values)


def dump(settings: Any) -> dict[str, Any]:
    """The TOML table of a dataclass: the inverse of `build`. Fields with the value None, and tables of such, are left out."""
    table: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            if inner := dump(value):
                table[field.name] = inner
        elif isinstance(value, tuple):
            table[field.name] = list(value)
        elif value is not None:
            table[field.name] = dict(value) if isinstance(value, Mapping) else value
    return table


def changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The keys of two TOML tables whose values differ, each with both values.

    >>> changes({"seed": 1, "train": {"steps": 6}}, {"seed": 1, "train": {"steps": 9, "clip": 0.5}})
    ['train.steps 6 → 9', 'train.clip unset → 0.5']
    """
    result = []
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            result += changes(old, new, f"{prefix}{key}.")
        elif old != new:
            result.append(f"{prefix}{key} {'unset' if old is None else old} → {'unset' if new is None else new}")
    return result


def override(cls: type, table: dict[str, Any], assignments: Sequence[str]) -> None:
    """Apply assignments of the form ``a.b=c`` to a TOML table of `cls`, in place.

    Text needs no quotes, and keeps blanks at its ends. The value `none` unsets an optional key. Raises ConfigError for a
    malformed assignment and an unknown key.
    """
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set {assignment!r} is not of the form key=value, as in --set train.steps=20.")
        kind = type_of(cls, key)
        *path, name = key.split(".")
        target = table
        for part in path:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ConfigError(f"--set {key}: {part} is a value in the configuration file, but must be a table.")
        value = parse(text, kind)
        if value is None:
            target.pop(name, None)
        else:
            target[name] = value


def assign(table: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested tables, in place."""
    *path, name = key.split(".")
    for part in path:
        table = table.setdefault(part, {})
    table[name] = value


def parse(text: str, kind: Any) -> Any:
    """The value of `text`, as given on a command line, for a field of type `kind`. Text that is not TOML stays as it is typed.

    >>> parse(" 8", int), parse("The ", str), parse('"The "', str), parse("none", float | None)
    (8, 'The ', 'The ', None)
    >>> parse("8", int | str), parse("8", str)
    (8, '8')
    """
    kinds = alternatives(kind)
    if type(None) in kinds and text.strip().lower() == "none":
        return None
    if dict in (typing.get_origin(kind) for kind in kinds) and not text.startswith("{"):
        text = "{" + text + "}"
    value = toml_value(text, text)
    return text if str in kinds and type(value) not in kinds else value


def type_of(cls: type, key: str) -> Any:
    """The type of the field that the dotted `key` names in `cls`. Raises ConfigError for an unknown key and for a table."""
    kind: Any = cls
    for part in key.split("."):
        hints = field_types(kind) if is_dataclass(kind) else {}
        if part not in hints:
            raise unknown_key(key, list(leaves(cls)), removed_of(kind).get(part))
        kind = hints[part]
    if is_dataclass(kind):
        raise ConfigError(f"{key} is a table; set one of its keys: {', '.join(leaves(typing.cast(type, kind), key + '.'))}.")
    return kind


def convert(key: str, value: Any, kind: Any) -> Any:
    """`value` as the type `kind`. Integers are accepted for floats, and lists for tuples; other types must match.

    Raises ConfigError, naming `key`, for a value of another type.
    """
    if type(value) is int and abs(value) > LARGEST_WHOLE:
        raise ConfigError(f"{key} = {str(value)[:40]}… is beyond ±(2^63 − 1), the integers that TOML has.")
    if type(value) is str and not is_unicode(value):
        raise ConfigError(f"{key} = {value!r} is no Unicode text: it holds bytes that are not UTF-8, or half of a character.")
    for alternative in alternatives(kind):
        origin, inner = typing.get_origin(alternative), typing.get_args(alternative)
        if alternative is float and type(value) is int:
            return float(value)
        if origin is tuple and isinstance(value, (list, tuple)):
            inner = len(value) * inner[:1] if inner[-1] is Ellipsis else inner
        if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(inner):
            return tuple(convert(key, item, part) for item, part in zip(value, inner, strict=True))
        if origin is dict and isinstance(value, Mapping):
            return {name: convert(f"{key}.{name}", item, inner[1]) for name, item in value.items()}
        if type(value) is alternative:
            return value
    raise ConfigError(f"{key} = {value!r} is {describe_value(value)}; {key} takes {describe(kind)}.")


def is_unicode(text: str) -> bool:
    """True if a text can be encoded: it holds no half of a character, as bytes of an argument that are not UTF-8 become."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union type, or the type itself as the only member."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def describe(kind: Any) -> str:
    """The name of a type in error messages.

    >>> describe(int | None), describe(tuple[float, float]), describe(tuple[str, ...])
    ('an integer', 'a list of 2 numbers', 'a list of texts')
    """
    words = []
    for alternative in alternatives(kind):
        origin, inner = typing.get_origin(alternative), typing.get_args(alternative)
        if origin is tuple:
            words.append("a list of texts" if inner[-1] is Ellipsis else f"a list of {len(inner)} numbers")
        elif origin is dict:
            words.append("a table of integers, as in {x = 2, y = 2}")
        elif alternative is not type(None):
            words.append({int: "an integer", float: "a number", bool: "true or false", str: "text"}[alternative])
    return " or ".join(words)


def describe_value(value: Any) -> str:
    """The name of a TOML value's type in error messages.

    >>> describe_value(True), describe_value([1])
    ('true or false', 'a list')
    """
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", list: "a list", dict: "a table"}
    return names.get(type(value), type(value).__name__)


def field_types(cls: Any) -> dict[str, Any]:
    """Field name → type of all fields of a dataclass, with string annotations resolved."""
    hints = type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def leaves(cls: type, prefix: str = "") -> Iterator[str]:
    """All dotted keys of a dataclass, those of nested dataclasses included."""
    for name, kind in field_types(cls).items():
        if is_dataclass(kind):
            yield from leaves(typing.cast(type, kind), f"{prefix}{name}.")
        else:
            yield prefix + name


def nearest_key(key: str, known: Sequence[str]) -> str:
    """The known key that another library gives this name, or else the most similar one."""
    name = key.rpartition(".")[2].replace("-", "_").lower()
    meant = (here for here, names in ELSEWHERE.items() if name in names.split() and here in known)
    return next(meant, None) or nearest(key, known)


def unknown_key(key: str, known: Sequence[str], removed: str | None = None) -> ConfigError:
    """The error for an unknown key, which suggests the nearest known key; `removed` is the remark on a key that was removed."""
    also = "" if removed is None else f"\n  It was removed: {removed}"
    return ConfigError(f"Unknown configuration key {key!r}. The nearest known key is {nearest_key(key, known)!r}.{also}")


def removed_of(cls: Any) -> Mapping[str, str]:
    """Key → remark of the keys that a dataclass no longer has, from its attribute REMOVED."""
    removed: Mapping[str, str] = getattr(cls, "REMOVED", {})
    return removed
