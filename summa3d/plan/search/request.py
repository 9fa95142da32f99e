"""What a search is asked for, from the words of a command line: a model, a cluster, and what plans may be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from ...cluster import Cluster
from ...errors import ConfigError, nearest
from ...files import toml_value, whole
from ...nn.config import COMMON, ModelConfig, named_models
from ...train.config import SPECIAL_TOKENS, Config, GridConfig, from_table, load, numbers_of, read_table, shipped, to_table
from ...train.toml import build, dump, override
from .plans import ERAS, FAMILIES, OPTIONS, ORDER, SCHEDULES, SCHEMES, SHORT, Space, keys_known, positive

SIZES = {"": 1.0, "B": 1.0, "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}
SIZES |= {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
HALF = ("bfloat16", "float16")
OPTIMIZER = ("train.optimizer=", "train.muon.")
"""How keys of a configuration begin that a plan does not decide, beside the model's."""
WORDS = {"scheme": SCHEMES, "family": FAMILIES, "recompute": ("none", "selective", "full"), "grid.order": (",".join(ORDER),)}
WORDS |= {"pipeline.schedule": SCHEDULES, **{key: tuple(values) for key, values in OPTIONS.items() if isinstance(values[0], str)}}
"""Key → the words that it takes, of those that take one of a few."""
TAKES = {"regather": (bool, "true or false", "regather=true"), "grid.tile": (dict, "a table of axes", "'tile={y=2, z=4}'")}
TAKES |= {key: (bool, "true or false", f"{key}=true") for key, values in OPTIONS.items() if isinstance(values[0], bool)}
"""Key → the type of its value, that in words, and an example, of the others that take no number."""
NUMBER = (int, "a whole number", "pp=8")


@dataclass(frozen=True)
class Request:
    """What is planned for: the configuration whose model is trained, and its name."""

    name: str
    config: Config


def request(asked: Sequence[str] | ModelConfig | Config, batch: int, cluster: Cluster) -> Request:
    """The model that words name: a name, a configuration (shipped, or a file) or a Transformers folder, then KEY=VALUE of it.

    KEY may be of the optimizer too: train.optimizer, train.muon.….

    A configuration keeps its dtype; other models have the first of HALF that the cluster has a rate of, else float32.

    Raises ConfigError for an unknown name, naming the nearest, for unknown keys, for sizes that no model has, and for mixtures
    whose layers differ or whose optimizer is Muon.
    """
    positive("batch", batch)
    if isinstance(asked, ModelConfig):
        return _request(asked.family, {"model": dump(asked), "dtype": _dtype_on(cluster)}, batch)
    if isinstance(asked, Config):
        return _request(asked.model.family, to_table(asked), batch)
    known, given = named_models(), [word for word in asked if "=" in word]
    names = [word for word in asked if "=" not in word]
    if len(names) > 1:
        raise ConfigError(f"--model takes one name and KEY=VALUE; it is given {', '.join(names)}.")
    name = names[0] if names else ",".join(given)
    if not names or names[0] in known:
        table: dict[str, Any] = {"model": dict(known[names[0]]) if names else {}, "dtype": _dtype_on(cluster)}
    elif names[0] in shipped() or names[0].endswith(".toml") or (Path(names[0]) / "config.json").is_file():
        load(names[0])  # so that an error names its file
        table = read_table(names[0])
    else:
        every = [*known, *shipped()]
        near = f"the nearest is {nearest(names[0], every)}"
        raise ConfigError(
            f"unknown model {names[0]!r}; {near}. A TOML file, a Transformers folder, or one of {', '.join(every)}."
        )
    override(Config, table, [word if word.startswith(("model.", *OPTIMIZER)) else f"model.{word}" for word in given])
    if not names and table["model"].get("family", "gpt2") in SPECIAL_TOKENS:
        table["model"] = COMMON | table["model"]
    return _request(name, table, batch)


def _request(name: str, table: dict[str, Any], batch: int) -> Request:
    """The request of a configuration's table, less what a plan decides."""
    model = build(ModelConfig, table.get("model", {}), "model.")
    _check_mixture(model, table.get("train", {}).get("optimizer"))
    if not table.get("data"):
        table["data"] = {"tokenizer": numbers_of(model)}
    train = {**table.get("train", {}), "batch": batch, "accumulate": 1}
    for key in ("grid", "pipeline", "scheme", "chosen", "recompute", "recompute_layers", "regather"):
        table.pop(key, None)
    return Request(name, from_table({**table, "train": train}))


def _check_mixture(model: ModelConfig, optimizer: str | None) -> None:
    """Raise ConfigError for mixtures whose steps are not predicted."""
    if not model.num_experts:
        return
    says = "No plan is searched; `summa3d train … --dry-run` says what a grid moves and holds."
    if model.dense_layers:
        raise ConfigError(f"model.moe.dense is {model.moe.dense!r}, and the layers of a plan are all alike. {says}")
    if optimizer == "muon":
        raise ConfigError(f"train.optimizer is 'muon', whose step is not predicted for experts ({model.family}). {says}")


def space_of(
    asked: Request, cluster: Cluster, ranks: int, batch: int, era: str, fixes: Sequence[str], limits: Sequence[str]
) -> Space:
    """Space of a search. Raises ConfigError for what cannot be; the keys that are known are those of `plans.keys_known`."""
    positive("ranks", ranks)
    if era not in ERAS:
        raise ConfigError(f"--era {era} is not known; the nearest is {nearest(era, list(ERAS))}. Known: {', '.join(ERAS)}.")
    least, most = _limited(limits)
    fixed = _fixed(fixes)
    _agree(least, most, fixed)
    nodes = tuple(level.size for level in cluster.levels if level.size)
    dtype = asked.config.dtype
    return Space(
        asked.config.model,
        ranks,
        batch,
        dtype,
        device_of(asked, cluster),
        nodes,
        cluster.ranks_per_node(ranks),
        ERAS[era],
        least,
        most,
        fixed,
    )


def device_of(asked: Request, cluster: Cluster) -> str:
    """The device of the ranks: the configuration's, else what the cluster has."""
    return asked.config.device or ("cpu" if cluster["host.slots"] else "cuda")


def _known(option: str, key: str) -> str:
    """The whole form of a key. Raises ConfigError for an unknown one."""
    if key not in keys_known():
        near = nearest(key, keys_known())
        raise ConfigError(f"{option} {key}: unknown key; the nearest is {near}. Known: {', '.join(keys_known())}.")
    return SHORT.get(key, key)


def _limited(limits: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Key → the least, and key → the most, of KEY<=NUMBER and KEY>=NUMBER; of a key that comes twice, the tighter."""
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    for text in limits:
        match = re.fullmatch(r"\s*([\w.]+)\s*(<=|>=)\s*(\d+)\s*", text)
        number = whole(match[3]) if match else None
        if not match or number is None:
            raise ConfigError(f"--limit {text!r} is not of the form KEY<=NUMBER or KEY>=NUMBER, as in --limit 'y<=8'.")
        key = _known("--limit", match[1])
        if key in WORDS or key in TAKES:
            raise ConfigError(f"--limit {text!r}: {match[1]} is no number; --fix {match[1]}=… takes it.")
        if match[2] == "<=":
            most[key] = min(number, most.get(key, number))
        else:
            least[key] = max(number, least.get(key, number))
    return least, most


def _fixed(fixes: Sequence[str]) -> dict[str, Any]:
    """Key → value of KEY=VALUE. Raises ConfigError for a value that the key cannot have, and for two of one key."""
    every: dict[str, Any] = {}
    for text in fixes:
        short, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise ConfigError(f"--fix {text!r} is not of the form KEY=VALUE, as in --fix pp=8.")
        key = _known("--fix", short)
        result = _value(short, key, value)
        if every.setdefault(key, result) != result:
            raise ConfigError(f"--fix {short} is given {every[key]} and {result}; a key has one value.")
    return every


def _value(short: str, key: str, text: str) -> Any:
    """The value of a key as text."""
    result = toml_value(text, text)
    words = WORDS.get(key)
    if words:
        if result not in words:
            raise ConfigError(f"--fix {short}={text}: the nearest is {nearest(text, words)}. Known: {', '.join(words)}.")
        return result
    kind, what, example = TAKES.get(key, NUMBER)
    if type(result) is not kind:
        raise ConfigError(f"--fix {short}={text}: {short} takes {what}, as in --fix {example}.")
    if kind is dict:
        build(GridConfig, {"tile": result}, "grid.")  # whose sizes are whole numbers
    return result


def _agree(least: Mapping[str, int], most: Mapping[str, int], fixed: Mapping[str, Any]) -> None:
    """Raise ConfigError for limits that leave no number, and for a fixed number that is not within them."""
    for key in sorted({*least, *most}):
        given = [f"{key}>={least[key]}" for _ in range(key in least)] + [f"{key}<={most[key]}" for _ in range(key in most)]
        low, high = least.get(key, 0), most.get(key, float("inf"))
        if low > high:
            raise ConfigError(f"--limit {' and '.join(given)}: no number is within both.")
        if key in fixed and not low <= fixed[key] <= high:
            raise ConfigError(f"--fix {key}={fixed[key]} is not within --limit {' and '.join(given)}.")


def bytes_of(text: str, option: str = "--memory") -> float:
    """Bytes of a size as text, which `option` has.

    >>> bytes_of("70GiB"), bytes_of("1.5 GB")
    (75161927680.0, 1500000000.0)
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", text)
    try:
        size = float(match[1]) * SIZES[match[2].upper()] if match else 0.0
    except (KeyError, ValueError):
        size = 0.0
    if not 0 < size < inf:
        raise ConfigError(f"{option} {text!r} is no size; write 70GiB, 80GB or a number of bytes.")
    return size


def _dtype_on(cluster: Cluster) -> str:
    return next((dtype for dtype in HALF if f"peak.{dtype}" in cluster.numbers), "float32")
