"""The config.json of a Transformers folder as the sizes of a model, which needs no torch."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, ConfigError
from ...files import read_json

CONFIG = "config.json"
FAMILY = "hf"
LONGEST = 1024
"""Tokens of a sequence where a model may have more, and nobody says how many: most models' longest does not fit."""
GATES = ("gate_proj", "gate_up_proj")
"""The beginning of a gated feed-forward layer's names in a plan."""
LAYERS = ("layer_types",)
"""Lists of a config that have an entry a layer."""


def transformers() -> Any:
    """The package. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError("A Transformers model needs the package transformers: pip install transformers.") from error


def model_table(folder: Path) -> dict[str, Any]:
    """The table `model` of a configuration whose model is that of a Transformers folder: sizes, and config.json as text.

    Raises CheckpointError where the folder's config.json cannot be read, ConfigError for an unknown model.
    """
    try:
        table = read_json(folder / CONFIG)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no Transformers folder: its {CONFIG} cannot be read ({error}).") from error
    text = json.dumps(table, sort_keys=True)
    return {"family": FAMILY, "folder": str(folder.resolve()), "config_json": text, **sizes_of(config_of(text))}


def config_of(text: str, layers: int | None = None) -> Any:
    """Transformers' config object of a config.json; layers : in place of its own, of which the first are taken."""
    try:
        table = json.loads(text)
        config = transformers().CONFIG_MAPPING[table["model_type"]].from_dict(table).get_text_config()
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{CONFIG} is not of a model that this transformers knows: {error}.") from error
    if layers is not None:
        config.num_hidden_layers = layers
        for name in LAYERS:
            if isinstance(result := getattr(config, name, None), list):
                setattr(config, name, result[:layers])
    return config


def sizes_of(config: Any) -> dict[str, Any]:
    """The keys of ModelConfig that a Transformers config has. Raises ConfigError, naming it, for one that it lacks."""
    names = {
        "layers": ("num_hidden_layers", "n_layer"),
        "hidden": ("hidden_size", "n_embd"),
        "heads": ("num_attention_heads", "n_head"),
        "vocabulary": ("vocab_size",),
    }
    sizes: dict[str, Any] = {}
    for ours, theirs in names.items():
        value = config_number(config, *theirs)
        if value is None:
            raise ConfigError(f"{type(config).__name__} has no {theirs[0]}, which a causal language model has.")
        sizes[ours] = value
    kv = config_number(config, "num_key_value_heads") or sizes["heads"]
    ffn = config_number(config, "intermediate_size", "n_inner") or 4 * sizes["hidden"]
    sizes |= {"kv_heads": kv, "ffn": ffn, "tied_head": bool(getattr(config, "tie_word_embeddings", False))}
    sizes["head_dim"] = config_number(config, "head_dim") or sizes["hidden"] // sizes["heads"]
    sizes["sequence"] = min(config_number(config, "max_position_embeddings") or LONGEST, LONGEST)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if not any(name.rpartition(".")[2] in GATES for name in plan):
        sizes["activation"] = "gelu"  # whichever it is: a layer without a gate
    return sizes


def dtype_of(text: str) -> str | None:
    """The dtype that a config.json names; None, none."""
    table = json.loads(text)
    result = table.get("dtype") or table.get("torch_dtype")
    return result if isinstance(result, str) else None


def config_number(config: Any, *names: str) -> int | None:
    """The first of these attributes that a config has as a whole number."""
    try:
        values = [getattr(config, name, None) for name in names]
    except RuntimeError as error:  # Transformers' own, of a size that differs by layer
        raise ConfigError(f"{type(config).__name__} has no one {names[0]} for all layers, which adopted models have.") from error
    return next((value for value in values if isinstance(value, int)), None)
