"""Import and export of Hugging Face Transformers folders (config.json and safetensors), bit for bit, one tensor at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...comm.grid import BaseGrid, Grid, Place
from ...comm.health.agreement import agree_on_error
from ...errors import CheckpointError, DataError, Summa3dError
from ...files import bytes_of, from_json, read_json, replace_text, replacing
from ...layout.layout import Layout, Sharding
from ...nn.config import ModelConfig
from .. import config as configuration
from .. import toml
from ..config import Config, DataConfig, master_dtype
from ..data import corpus
from ..lease import Lease
from ..on_root import on_root
from ..precision import torch_dtype
from . import folder as checkpoint
from . import huggingface_files, shards, writer
from .adopted import FolderForm
from .huggingface_names import FAMILIES, Mapping, TensorRule

if TYPE_CHECKING:
    from mpi4py import MPI

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
ORIGINAL = "hf_config.json"
"""Name of the imported config.json in the run folder: export restores the keys that summa3d does not know."""
PROPERTIES = {"ffn": "ffn_dim", "norm_eps": "eps", "kv_heads": "num_kv_heads", "rotary_base": "theta"}
PROPERTIES |= {"rotary_scaling": "scaling", "tied_head": "tied", "activation": "activation_function"}
PROPERTIES |= {"experts": "num_experts", "experts_per_token": "num_chosen", "balance": "balance_weight", "head_dim": "head_size"}
PROPERTIES |= {"qkv_bias": "has_qkv_bias", "moe.width": "expert_width", "moe.shared": "shared_width"}
PROPERTIES |= {"moe.renormalise": "renormalised"}
"""Key of ModelConfig → the property that fills in the family's default."""
LISTS = ("moe.dense",)
"""The keys of ModelConfig that are text with commas, and lists in config.json."""
ONE_RANK = Place({"r": 1})
"""A grid of one rank, on which an exported tensor is assembled."""


@dataclass(frozen=True)
class Source:
    """A Transformers folder before any tensor is read: model, dtype, config.json, and the listing of its tensors."""

    model: ModelConfig
    dtype: str
    original: dict[str, Any]
    tensors: dict[str, huggingface_files.Entry]


def import_folder(source: Path, run: Path, comm: MPI.Intracomm, overwrite: bool = False) -> Path:
    """Make a run folder with the weights of a Transformers folder as checkpoint step-0; collective.

    Parameters
    ----------
    source : folder with config.json and safetensors files, and optionally tokenizer.json
    run : the run folder to make; `train --resume` and `generate` accept it, on any grid
    overwrite : whether to delete checkpoints that `run` already holds

    Returns the path of the checkpoint. Memory: a rank holds its share of the rows of every tensor, and one whole tensor.

    Raises CheckpointError, on every rank alike, where `source` is not a Transformers folder, for an unsupported family or
    option, and for tensors that are missing, unknown or of another shape.
    """

    def read() -> Source:
        if (source / TOKENIZER).is_file():
            _tokenizer_files(source / TOKENIZER)
        return read_source(source)

    result = on_root(comm, read, CheckpointError)
    with Lease() as lease:
        on_root(comm, lambda: _open_run(run, overwrite, lease), CheckpointError)
        grid = Grid(comm, {"r": comm.size})
        data = DataConfig(tokenizer=_tokenizer(source, run, result.model))
        config = Config(scheme="serial", chosen="scheme and grid", dtype=result.dtype, model=result.model, data=data)
        blocks: list[shards.TensorBlock] = []
        error: Exception | None = None
        try:
            with huggingface_files.HuggingFaceReader(source, result.tensors) as reader:
                blocks.extend(_local_rows(rule, reader, result, grid) for rule in rules_of(result.model))
        except Summa3dError as caught:
            error = caught
        agree_on_error(comm, error)
        path = writer.save(run / "checkpoints", 0, blocks, grid, config)

        def describe() -> None:
            if config.data.tokenizer_file:
                _write_all(_tokenizer_files(source / TOKENIZER), run)
            configuration.write(configuration.to_table(config), run / "config.toml")
            with replacing(run / ORIGINAL) as new:
                new.write_text(json.dumps(result.original, indent=2) + "\n", encoding="utf-8")

        on_root(comm, describe, CheckpointError)
        grid.free()
        return path


def _tokenizer(source: Path, run: Path, model: ModelConfig) -> str:
    """data.tokenizer of an imported model: its own tokenizer.json where a causal model came with one, else "bytes"."""
    own = model.architecture.causal and (source / TOKENIZER).is_file()
    return f"bpe:{model.vocabulary}:{(run / TOKENIZER).resolve()}" if own else "bytes"


def _local_rows(
    rule: TensorRule, reader: huggingface_files.HuggingFaceReader, source: Source, grid: BaseGrid
) -> shards.TensorBlock:
    """This rank's rows of the tensor that `rule` describes."""
    whole = to_ours(rule, [reader.read(name) for name in rule.theirs], source.model)
    sharding = Sharding(Layout(("r",), *[()] * (whole.dim() - 1)), tuple(whole.shape))
    share = whole[sharding.slices(grid)].to(torch_dtype(master_dtype(source.dtype)), copy=True)
    return shards.TensorBlock(f"model.{rule.ours}", share.contiguous(), sharding)


def export_folder(
    saved: checkpoint.Checkpoint,
    target: Path,
    dtype: str | None = None,
    file_bytes: int = 5 << 30,
    tokenizer: Path | None = None,
) -> list[Path]:
    """Write a checkpoint as a Transformers folder and return the paths of its files. Runs on one rank.

    Parameters
    ----------
    saved : a verified checkpoint
    target : a new or empty folder
    dtype : dtype of the files; default: the dtype that the model computed in
    file_bytes : largest size of a file, in bytes of tensors; a larger tensor has a file of its own
    tokenizer : a tokenizer.json, or a folder with one, that goes along; default: that in the run folder, see `tokenizer_of`

    Memory: one tensor at a time. Raises CheckpointError for a family without a Transformers form, and where `target` is not
    empty; DataError where a tokenizer cannot be read as one.
    """
    model = toml.build(ModelConfig, saved.index["model"], "model.")
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty. Choose another folder, so that no file of another model stays in it.")
    run = run_of(saved)
    if tokenizer is not None:
        others = _tokenizer_files(tokenizer / TOKENIZER if tokenizer.is_dir() else tokenizer)
    else:
        others = {} if (own := tokenizer_of(saved)) is None else _tokenizer_files(own, run)
    original = None if run is None or not is_in(run, run / ORIGINAL) else run / ORIGINAL
    form: FolderForm | RuleForm = FolderForm.of(model) if model.family == "hf" else RuleForm.of(model, original)
    target.mkdir(parents=True, exist_ok=True)
    dtype = dtype or saved.index["dtype"]

    def tensors() -> Iterator[Tensor]:
        kept = torch_dtype(master_dtype(saved.index["dtype"]))
        with shards.ShardReader(saved.path, saved.index["tensors"]) as reader:
            yield from (tensor.to(torch_dtype(dtype)) for tensor in form.tensors(reader, kept, ONE_RANK))

    files = huggingface_files.write(target, form.listing, dtype, tensors(), file_bytes)
    replace_text(target / "config.json", json.dumps(form.config(dtype), indent=2) + "\n")
    return files + _write_all(others, target)


@dataclass(frozen=True)
class RuleForm:
    """The tensors of a Transformers folder of one of our families, by its rules; original : what config.json had."""

    model: ModelConfig
    original: dict[str, Any]

    @classmethod
    def of(cls, model: ModelConfig, original: Path | None) -> RuleForm:
        """That of a model. Raises CheckpointError for one without a Transformers form. original : the imported config.json"""
        known = ", ".join((*FAMILIES, "hf"))
        if model.family not in FAMILIES:
            raise CheckpointError(f"A {model.family} model cannot be exported. Families that can be exported: {known}.")
        if model.family == "gpt2" and model.grouped:
            raise CheckpointError(
                f"A gpt2 model of {model.heads} heads and {model.kv_heads} heads of k and v cannot be exported: "
                f"{FAMILIES['gpt2'].architecture} has as many of each. Our checkpoints hold it, on any grid."
            )
        if model.moe.competing != (1, 1) or model.moe.scored_by != "softmax" or model.moe.bias_rate is not None:
            raise CheckpointError(
                f"A {model.family} model with model.moe.scores, groups or bias_rate cannot be exported: "
                f"{FAMILIES[model.family].architecture} has none of them. Our checkpoints hold it, on any grid."
            )
        return cls(model, read_json(original) if original is not None else {})

    @property
    def listing(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the folder's tensors."""
        return [named for rule in rules_of(self.model) for named in shapes_of(rule, self.model)]

    def tensors(self, reader: shards.ShardReader, dtype: torch.dtype, grid: BaseGrid) -> Iterator[Tensor]:
        """The tensors in the order of `listing`, read from a checkpoint in its `dtype`; those of one rule are in memory."""
        for rule in rules_of(self.model):
            shape = our_shape(rule, self.model)
            block = shards.TensorBlock(f"model.{rule.ours}", torch.empty(shape, dtype=dtype), _unsharded(shape))
            reader.read(block, grid)
            yield from to_theirs(rule, block.tensor, self.model)

    def config(self, dtype: str) -> dict[str, Any]:
        """config.json."""
        return config_of(self.model, dtype, self.original)


def tokenizer_name(saved: checkpoint.Checkpoint) -> str:
    """The data.tokenizer of a checkpoint's run; that of older checkpoints, which do not name it, is in the run folder."""
    return saved.config["data"]["tokenizer"] if saved.config is not None else "bpe"


def run_of(saved: checkpoint.Checkpoint) -> Path | None:
    """The run folder that a checkpoint lies in; None for one that lies elsewhere."""
    folder = saved.path.absolute().parent
    return folder.parent if folder.name == "checkpoints" else None


def is_in(run: Path, file: Path) -> bool:
    """Return whether this is a file of a run folder, and no link that leads out of it."""
    return file.is_file() and Path(os.path.realpath(file)).is_relative_to(os.path.realpath(run))


def tokenizer_of(saved: checkpoint.Checkpoint) -> Path | None:
    """The tokenizer.json of a checkpoint's run; None for bytes and numbers, and where the run folder holds none.

    A checkpoint may name any file of the computer, and may come from somebody else: none outside of its run folder is read.
    """
    named, run = tokenizer_name(saved), run_of(saved)
    if run is None or named.partition(":")[0] in ("bytes", "numbers"):
        return None
    own = configuration.tokenizer_file(named)
    places = [Path(own), run / TOKENIZER] if own else [run / "data" / TOKENIZER]  # a run folder may have been moved
    return next((place for place in places if is_in(run, place)), None)


def _tokenizer_files(file: Path, run: Path | None = None) -> dict[str, bytes]:
    """Name → contents of a tokenizer.json, and of the tokenizer_config.json beside it, where there is one (in `run`, if given).

    Raises DataError where they are not what they are called.
    """
    result, beside = {TOKENIZER: corpus.tokenizer_bytes(file)}, file.with_name(TOKENIZER_CONFIG)
    if beside.is_file() if run is None else is_in(run, beside):
        try:
            result[TOKENIZER_CONFIG] = bytes_of(beside)
            if not isinstance(from_json(result[TOKENIZER_CONFIG]), dict):
                raise ValueError("it is no JSON object")
        except (OSError, ValueError) as error:
            raise DataError(f"{beside} cannot be read: {error}.") from error
    return result


def _write_all(files: dict[str, bytes], target: Path) -> list[Path]:
    """Write files by name into a folder, and return their paths."""
    for name, data in files.items():
        with replacing(target / name) as new:
            new.write_bytes(data)
    return [target / name for name in files]


def _unsharded(shape: tuple[int, ...]) -> Sharding:
    return Sharding(Layout(*[()] * len(shape)), shape)


def rules_of(model: ModelConfig) -> list[TensorRule]:
    """The rules of all tensors of a model, with the layers' and experts' numbers in the names."""
    mapping, dense = FAMILIES[model.family], model.dense_layers

    def numbered(rule: TensorRule, layer: int) -> Iterator[TensorRule]:
        other = ".moe." if layer in dense else ".mlp."
        if other in rule.ours or (rule.unless and getattr(model, rule.unless)):
            return
        for expert in range(model.num_experts if rule.ours.count("{}") > 1 else 1):
            theirs = tuple(name.format(layer, expert) for name in rule.theirs)
            yield replace(rule, ours=rule.ours.format(layer, expert), theirs=theirs)

    once = (rule for rule in mapping.once if not (rule.unless and getattr(model, rule.unless)))
    return [*once, *(item for layer in range(model.layers) for rule in mapping.layer for item in numbered(rule, layer))]


def to_ours(rule: TensorRule, theirs: list[Tensor], model: ModelConfig) -> Tensor:
    """The summa3d tensor, made of the Transformers tensors `theirs`."""
    parts = [part.T if rule.transposed else part for part in theirs]
    if not rule.heads:
        return parts[0]
    if len(parts) == 1:
        parts = list(parts[0].chunk(rule.parts, -1))
    heads = getattr(model, rule.heads)
    return torch.stack([part.unflatten(-1, (heads, -1)) for part in parts], -2).flatten(-3)  # […, head, part, d]


def to_theirs(rule: TensorRule, ours: Tensor, model: ModelConfig) -> list[Tensor]:
    """The Transformers tensors that the summa3d tensor `ours` contains: the inverse of `to_ours`."""
    parts = [ours]
    if rule.heads:
        heads = getattr(model, rule.heads)
        parts = [part.flatten(-2) for part in ours.unflatten(-1, (heads, rule.parts, -1)).unbind(-2)]
        parts = [torch.cat(parts, -1)] if len(rule.theirs) == 1 else parts
    return [part.T.contiguous() if rule.transposed else part.contiguous() for part in parts]


def our_shape(rule: TensorRule, model: ModelConfig) -> tuple[int, ...]:
    """The shape of the summa3d tensor of `rule`."""
    sizes = {"h": model.hidden, "f": model.ffn_dim, "v": model.vocabulary, "s": model.sequence, "2": 2}
    sizes |= {"e": model.num_experts, "w": model.expert_width, "u": model.shared_width, "1": 1, "3h": 3 * model.hidden}
    d, kv = model.head_size, model.num_kv_heads * model.head_size
    sizes |= {"a": model.attention_width, "d": d, "kd": kv, "kv": 2 * kv}
    return tuple(sizes[extent] for extent in rule.shape.split())


def shapes_of(rule: TensorRule, model: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the Transformers tensors of `rule`."""
    theirs = to_theirs(rule, torch.empty(our_shape(rule, model), device="meta"), model)
    return [(name, tuple(part.shape)) for name, part in zip(rule.theirs, theirs, strict=True)]


def read_source(source: Path) -> Source:
    """Read the configuration and the tensor listing of a Transformers folder, and check one against the other.

    Reads headers only, except for tied tensors that are stored twice. Raises CheckpointError as `import_folder` does.
    """
    try:
        original = read_json(source / "config.json")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source} is not a Transformers folder: its config.json cannot be read ({error}).") from error
    model = model_of(original, source)
    mapping = FAMILIES[model.family]
    wanted = {name for rule in rules_of(model) for name in rule.theirs}
    named = {
        mapping.base + name if mapping.base + name in wanted else name: entry
        for name, entry in huggingface_files.listing(source).items()
        if not name.endswith(mapping.ignored)
    }
    _check_names(set(named), wanted, mapping, source)
    _check_copies(named, wanted, mapping, source)
    tensors = {name: entry for name, entry in named.items() if name in wanted}
    _check_shapes(tensors, model, source)
    return Source(model, huggingface_files.widest({entry.dtype for entry in tensors.values()}, source), original, tensors)


def model_of(original: dict[str, Any], source: Path) -> ModelConfig:
    """The ModelConfig of a Transformers config.json. Raises CheckpointError for an unsupported family or option."""
    family = original.get("model_type") if isinstance(original, dict) else None
    if not isinstance(family, str) or family not in FAMILIES:
        raise CheckpointError(
            f"{source} holds a model of type {family!r}. Types that can be imported: {', '.join(FAMILIES)}. "
            f"Other causal language models are trained as they are: summa3d train {source}."
        )
    mapping = FAMILIES[family]
    original = _renamed(original, mapping)
    for key, allowed in mapping.fixed.items():
        value = _lookup(original, key, allowed[0])
        if value not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise CheckpointError(f"{source}: config.json says {key} = {value!r}; our {family} supports {choices} only.")
    values: dict[str, Any] = {"family": family}
    for ours, (theirs, default) in mapping.keys.items():
        result = {key: value for key in theirs if (value := _lookup(original, key, None)) is not None}
        result = {key: _in_text(value) if ours in LISTS else value for key, value in result.items()}
        wrong = next((key for key, value in result.items() if not isinstance(value, (int, float, str))), None)
        if wrong is not None:
            raise CheckpointError(f"{source}: config.json says {wrong} = {result[wrong]!r}, which is neither a number nor text.")
        if len(set(result.values())) > 1:
            raise CheckpointError(f"{source}: config.json says {result}; our {family} has one value for these, model.{ours}.")
        value = next(iter(result.values()), default)
        value = mapping.words.get(ours, {}).get(value, value)
        if value is not None:
            toml.assign(values, ours, value)
    head = None if "head_dim" in mapping.keys else original.get("head_dim")
    config = toml.build(ModelConfig, values, "model.")
    if head is not None and (type(head) is not int or head * config.heads != config.hidden):
        raise CheckpointError(
            f"{source}: config.json says head_dim = {head}, but {config.heads} heads × {head} differ from hidden = "
            f"{config.hidden}; our {family} supports head_dim = hidden / heads only."
        )
    return config


def config_of(model: ModelConfig, dtype: str, original: dict[str, Any]) -> dict[str, Any]:
    """The Transformers config.json of a model: `original` (of an imported model) with all keys of ModelConfig updated."""
    mapping = FAMILIES[model.family]
    result: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **_renamed(original, mapping)}
    for key, allowed in mapping.fixed.items():
        if _lookup(result, key, None) not in allowed:
            toml.assign(result, key, allowed[0])
    for ours, (theirs, _) in mapping.keys.items():
        value, words = _ours(model, ours), mapping.words.get(ours, {})
        written = next((word for word, meaning in words.items() if meaning == value), value)
        written = [int(item) for item in written.split(",") if item] if ours in LISTS and written is not None else written
        for key in theirs if value is not None else ():
            if words.get(_in_text(_lookup(result, key, None))) != value:
                toml.assign(result, key, written)
    return {**result, "architectures": [mapping.architecture], "dtype": dtype}


def _ours(model: ModelConfig, key: str) -> Any:
    """The value of a key of ModelConfig, with the family's default filled in."""
    return attrgetter(PROPERTIES.get(key, key))(model)


def _renamed(original: dict[str, Any], mapping: Mapping) -> dict[str, Any]:
    """A copy of config.json in which older keys have their present names."""
    result: dict[str, Any] = json.loads(json.dumps({key: value for key, value in original.items() if key != "torch_dtype"}))
    for old, new in mapping.renamed.items():
        *path, name = old.split(".")
        table = _lookup(result, ".".join(path), None) if path else result
        if isinstance(table, dict) and name in table:
            toml.assign(result, new, table.pop(name))
            if path and not table:
                toml.assign(result, ".".join(path), None)
    return result


def _in_text(value: Any) -> Any:
    """A list of whole numbers as text with commas; what is none, as it is."""
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _lookup(table: dict[str, Any], key: str, default: Any) -> Any:
    for part in key.split("."):
        if not isinstance(table, dict) or part not in table:
            return default
        table = table[part]
    return table


def _check_names(names: set[str], wanted: set[str], mapping: Mapping, source: Path) -> None:
    missing, unknown = sorted(wanted - names), sorted(names - wanted - set(mapping.copies))
    for fault, tensors in (("lacks", missing), ("holds unknown tensors:", unknown)):
        if tensors:
            more = f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
            raise CheckpointError(
                f"{source} {fault} {', '.join(tensors[:4])}{more}.\n"
                f"  An import needs exactly the tensors of {mapping.architecture}."
            )


def _check_copies(named: dict[str, huggingface_files.Entry], wanted: set[str], mapping: Mapping, source: Path) -> None:
    with huggingface_files.HuggingFaceReader(source, named) as reader:
        for name in (named.keys() & mapping.copies.keys()) - wanted:
            first = mapping.copies[name]
            if not torch.equal(reader.read(name), reader.read(first)):
                raise CheckpointError(f"{source}: {name} differs from {first}; our model ties them, as one tensor.")


def _check_shapes(tensors: dict[str, huggingface_files.Entry], model: ModelConfig, source: Path) -> None:
    """Compare every shape with the shape that follows from the sizes of the configuration."""
    for rule in rules_of(model):
        for name, shape in shapes_of(rule, model):
            if tensors[name].shape != shape:
                raise CheckpointError(f"{source}: {name} has shape {tensors[name].shape}; config.json's sizes make it {shape}.")


def _open_run(run: Path, overwrite: bool, lease: Lease) -> None:
    from ..prepare import open_folder

    open_folder(run, resume=False, overwrite=overwrite, lease=lease)
