# The configuration of a run: frozen dataclasses for the keys of DESIGN §8, read from one TOML file and `--set` overrides.
# Imports nn.config, nn.scheme_kinds and errors; no torch.
# Next: tables.py (TOML ↔ dataclass), tokens.py (what data.* means), loop.py (what train.* means).
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any

from ..comm.arrays import DEVICES
from ..comm.transport.select import NAMES as TRANSPORTS
from ..dtypes import FLOATS, HALVES
from ..errors import ConfigError
from ..nn.config import ModelConfig
from ..nn.overlap import Overlap
from ..nn.scheme_kinds import KINDS
from . import tables

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMES = tuple(KINDS)
RECOMPUTE = ("none", "selective", "full")
SPECIAL_TOKENS = {"gpt2": 0, "llama": 0, "bert": 3}
"""The families that are trained on text, and how many tokens each needs besides the tokenizer's (`objective`)."""
NAMED_CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class GridConfig:
    """Sizes of the grid axes; `order` lists them fastest first; `tile` packs a tile of the grid per node.

    oned and oned-sp use y; summa x and y; tesseract x, y and d; cuboid and cuboid-sequence x, y and z.
    """

    x: int = 1
    y: int = 1
    z: int = 1
    d: int = 1
    order: str = "zyx"
    tile: dict[str, int] | None = None

    def __post_init__(self) -> None:
        for name in ("x", "y", "z", "d"):
            at_least(f"grid.{name}", getattr(self, name), 1)

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the process grid, by name: x, y, z, and a d of more than 1."""
        return {"x": self.x, "y": self.y, "z": self.z} | ({"d": self.d} if self.d > 1 else {})

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes.items())


@dataclass(frozen=True)
class TrainConfig:
    """How to train. `batch` counts the rows of one optimizer step on the whole grid, taken in `accumulate` equal parts.

    The learning rate rises over `warmup` steps, then falls along a cosine to `decay_to` times itself. A period of 0 means
    only at the end; a `clip` or `watchdog` of 0, never. `keep` is the number of checkpoints kept; 0 writes none. A family that
    continues text ends with a sample: `sample_prompt` and `sample_tokens` more.
    """

    steps: int = 300
    batch: int = 16
    accumulate: int = 1
    seed: int = 1
    learning_rate: float = 1e-3
    decay_to: float = 0.1
    warmup: int = 20
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    clip: float = 1.0
    evaluate_every: int = 0
    evaluate_batches: int = 8
    checkpoint_every: int = 0
    keep: int = 2
    sample_tokens: int = 0
    sample_prompt: str = "def "
    watchdog: float = 600.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "evaluate_batches"):
            at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("seed", "warmup", "evaluate_every", "checkpoint_every", "keep", "sample_tokens", "watchdog"):
            at_least(f"train.{name}", getattr(self, name), 0)
        for name in ("learning_rate", "weight_decay", "clip"):
            at_least(f"train.{name}", getattr(self, name), 0)
        if self.batch % self.accumulate:
            fits = [n for n in range(1, self.batch + 1) if self.batch % n == 0]
            raise ConfigError(
                f"train.batch {self.batch} cannot be divided into train.accumulate = {self.accumulate} equal micro-batches.\n"
                f"  Values of train.accumulate that fit batch {self.batch}: {', '.join(map(str, fits))}."
            )
        if not 0 <= self.decay_to <= 1:
            raise ConfigError(f"train.decay_to = {self.decay_to}; it is a part of train.learning_rate, in [0, 1].")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"train.betas = {list(self.betas)}; both must lie in [0, 1).")
        if not 0 < self.epsilon < inf:
            raise ConfigError(f"train.epsilon = {self.epsilon}; it must be positive and finite.")
        if not self.sample_prompt:
            raise ConfigError("train.sample_prompt is empty; a sample continues at least one character.")

    @property
    def micro_batch(self) -> int:
        """Rows that go through the model at once."""
        return self.batch // self.accumulate


@dataclass(frozen=True)
class LossScaleConfig:
    """What a float16 run multiplies its loss by, so that small gradients are not rounded to 0: `initial` at first.

    A step whose gradients are not finite is skipped and halves the scale; `growth_every` good ones in a row double it, up to
    `largest`. Other dtypes have no use for it.
    """

    initial: float = 65536.0
    growth_every: int = 1000
    largest: float = 16777216.0

    def __post_init__(self) -> None:
        at_least("loss_scale.initial", self.initial, 1)
        at_least("loss_scale.growth_every", self.growth_every, 1)
        at_least("loss_scale.largest", self.largest, self.initial)


@dataclass(frozen=True)
class DataConfig:
    """The corpus: `stdlib` (the running interpreter's own library), a file, or a folder of text files.

    `tokenizer` is `bytes`, `bpe:N` for a byte-pair encoding of N tokens trained on the corpus itself, or `bpe:N:FILE` for one
    of at most N tokens in a tokenizer.json of the `tokenizers` library. `held_out` is the part kept for validation.
    """

    path: str = "stdlib"
    tokenizer: str = "bytes"
    held_out: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ConfigError(f"data.held_out = {self.held_out}; it must lie between 0 and 1.")
        name, _, rest = self.tokenizer.partition(":")
        size = rest.partition(":")[0]
        if self.tokenizer != "bytes" and not (name == "bpe" and size.isdigit() and int(size) >= 256):
            raise ConfigError(
                f"data.tokenizer = {self.tokenizer!r} is not known. Use 'bytes', 'bpe:N' with N ≥ 256, or 'bpe:N:FILE'."
            )

    @property
    def vocabulary(self) -> int:
        """How many token numbers the tokenizer may give."""
        return 256 if self.tokenizer == "bytes" else int(self.tokenizer.split(":")[1])

    @property
    def tokenizer_file(self) -> str:
        """The file of a tokenizer that is not trained on the corpus; empty where there is none."""
        return self.tokenizer.partition(":")[2].partition(":")[2]


@dataclass(frozen=True)
class Config:
    """Everything that decides a run.

    `dtype` is that of activations and of the weights that meet them, and so of every gather, scatter and sum that carries
    them, their gradients included; sums of 16-bit floats are added in float32 and rounded once. The statistics of norms, the
    softmax of the loss and the loss travel in float32 or wider, the gradient norm in float64. With bfloat16 and float16 the
    weights themselves, their accumulated gradients and the optimizer's moments are float32, in memory and in checkpoints.

    `scheme` says how every tensor is split over the grid's axes (`nn.scheme`), and `vectors` how it stores γ, β and biases:
    "copied", or what else the scheme offers. `regather` has backward gather operands again instead of keeping them. `recompute`
    has it compute again what it would have kept: "full", every `recompute_layers` layers from their input; "selective", the
    attention core alone. `overlap` says what is in flight meanwhile (`nn.overlap`). `transport` is what carries device arrays
    (comm/transport); auto leaves it to SUMMA3D_TRANSPORT, or the rule. `device` is where the run computes, cpu or cuda; left out,
    it is what SUMMA3D_DEVICE says, else cpu. `tf32` lets a device round the operands of float32 products to 11 bits.
    """

    scheme: str = "cuboid"
    dtype: str = "float32"
    regather: bool = True
    vectors: str = "copied"
    recompute: str = "none"
    recompute_layers: int = 1
    device: str | None = None
    tf32: bool = False
    transport: str = "auto"
    grid: GridConfig = field(default_factory=GridConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    overlap: Overlap = field(default_factory=Overlap)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        choices = (
            ("scheme", self.scheme, SCHEMES),
            ("dtype", self.dtype, FLOATS),
            ("recompute", self.recompute, RECOMPUTE),
            ("transport", self.transport, TRANSPORTS),
            *([] if self.device is None else [("device", self.device, DEVICES)]),
        )
        for name, value, known in choices:
            if value not in known:
                raise ConfigError(
                    f"{name} = {value!r} is not known. Nearest: {tables.nearest(value, known)!r}. All: {', '.join(known)}."
                )
        at_least("recompute_layers", self.recompute_layers, 1)
        if self.recompute_layers > 1 and self.recompute != "full":
            raise ConfigError(
                f"recompute_layers = {self.recompute_layers} groups layers that are computed again as a whole, which "
                f'recompute = "{self.recompute}" does not do. Set recompute to "full", or leave recompute_layers at 1.'
            )
        self._check_vocabulary()

    def _check_vocabulary(self) -> None:
        if self.model.family not in SPECIAL_TOKENS:
            raise ConfigError(
                f"A {self.model.family} cannot be trained on text. Values of model.family that can: {', '.join(SPECIAL_TOKENS)}."
            )
        special = SPECIAL_TOKENS[self.model.family]
        needed = self.data.vocabulary + special
        if self.model.vocabulary < needed:
            more = f" and the {special} special ones of a {self.model.family}" if special else ""
            raise ConfigError(
                f"model.vocabulary {self.model.vocabulary} is smaller than the {self.data.vocabulary} tokens of "
                f"data.tokenizer = {self.data.tokenizer!r}{more}. Set model.vocabulary to {needed} or more."
            )
        if special and self.model.sequence < special + 2:
            raise ConfigError(
                f"model.sequence is {self.model.sequence}; two pieces of text and {special} special tokens need {special + 2}."
            )


def master_dtype(dtype: str) -> str:
    """The dtype of weights, accumulated gradients and moments in a run of `dtype`."""
    return "float32" if dtype in HALVES else dtype


def at_least(key: str, value: float, minimum: float) -> None:
    if not minimum <= value < inf:
        raise ConfigError(f"{key} is {value}; it must be at least {minimum}{'' if isfinite(value) else ', and finite'}.")


def load(source: str, assignments: Sequence[str] = ()) -> Config:
    """The configuration named `source` (shipped with the package) or in the TOML file `source`, with ``a.b=c`` overrides.

    Raises ConfigError for a missing or unreadable file, an unknown key (naming the nearest known one), a value of a wrong
    type, and for values that no run can have.
    """
    table = read_table(source)
    tables.override(Config, table, assignments)
    return from_table(table)


def from_table(table: dict[str, Any]) -> Config:
    """A configuration from its TOML table."""
    return tables.build(Config, table)


def to_table(config: Config) -> dict[str, Any]:
    """The TOML table of a configuration."""
    return tables.dump(config)


def read_table(source: str) -> dict[str, Any]:
    """The TOML table of a named configuration or a file."""
    path = Path(source)
    if path.suffix != ".toml" and path.name == source:
        path = NAMED_CONFIGS / f"{source}.toml"
    if not path.is_file():
        shipped = sorted(file.stem for file in NAMED_CONFIGS.glob("*.toml"))
        raise ConfigError(f"No configuration {source!r}: neither a TOML file nor one of those shipped: {', '.join(shipped)}.")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"Cannot read the configuration {path}: {error}") from error


def write(config: Config, path: Path) -> None:
    """Write `config` as TOML, so that `load` gives it back."""
    import tomli_w

    path.write_text(tomli_w.dumps(to_table(config)), encoding="utf-8")
