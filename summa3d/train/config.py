"""The configuration of a run: one frozen dataclass per TOML table, read from a TOML file and `--set` overrides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any

from ..columns import counted
from ..comm.device.arrays import DEVICES
from ..comm.topology import axes_in, divisors
from ..comm.transport.select import NAMES as TRANSPORTS
from ..dtypes import FLOATS, HALVES
from ..errors import ConfigError, nearest
from ..files import read_json, read_toml, replacing, titles, whole
from ..nn.adopt.source import CONFIG, dtype_of, model_table
from ..nn.config import LARGEST_SIZE, MOST_LAYERS, ModelConfig, named_models
from ..nn.context_parallel.options import ContextOptions
from ..nn.context_parallel.split import ContextSplit
from ..nn.overlap import AUTO, Overlap
from ..nn.schemes.registry import SCHEME_SPECS
from ..node_support import MOST_SECONDS
from ..parallel.schedule import rule_of, split_layers
from . import toml

SCHEMES = tuple(SCHEME_SPECS)
CHOSEN = ("", "grid", "scheme and grid", "grid and replicas", "scheme, grid and replicas")
REPLICAS = "replicas"
"""The word of CHOSEN that has grid.dp among what is chosen."""
RECOMPUTE = ("none", "selective", "full")
SPECIAL_TOKENS = {"gpt2": 0, "llama": 0, "mixtral": 0, "qwen2_moe": 0, "qwen3_moe": 0, "olmoe": 0, "hf": 0, "bert": 3}
"""Model families that can be trained on text → the number of special tokens that follow the tokenizer's own."""
GRID_AXES = ("x", "y", "z", "d", "cp", "ep", "dp", "pp")
HIDDEN = {"chosen"}
"""Keys that nobody sets: what `summa3d train` writes for itself."""
SIZES = {"grid.x", "grid.y", "grid.z", "grid.d"}
CATCHABLE = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT")
"""What job systems send before they end a job, beside SIGTERM, and launchers pass on."""
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
OPTIMIZERS = ("adamw", "muon")
RATES = ("cosine", "linear", "constant", "wsd")
ADJUSTMENTS = ("match_rms_adamw", "original")
MOST_ITERATIONS = 99
"""Of Newton–Schulz, as in torch."""
MOST_RANKS = 2**20
"""Of an axis."""
NAMED_CONFIGS = Path(__file__).parent / "configs"
OF_NAMED_MODELS: dict[str, Any] = {"dtype": "bfloat16", "train": {"batch": 512, "accumulate": 8}}
"""Keys of the configuration that is a model's by name, beside `model` and `data`."""


@dataclass(frozen=True)
class GridConfig:
    """The table `grid`: sizes of the grid axes.

    The schemes oned and oned-sp use the axis y; summa uses x and y; tesseract x, y and d; cuboid and cuboid-sequence x, y and z.

    Attributes
    ----------
    x : ranks along axis x; where no size of the grid is given, `summa3d train` chooses all, where some are, the others are 1
    y : ranks along axis y, as x
    z : ranks along axis z, as x
    d : ranks along axis d, the depth of tesseract, as x; the product of all sizes of the grid is the number of ranks
    cp : contexts, each of which holds a part of every sequence (the table `context`); their gradients are summed with those of dp
    ep : replicas that share the experts of a layer, each of which one holds, for the tokens of all; they have rows of their own
        and copies of all else, as those of dp
    dp : replicas of the model, each on its own rows of the batch; their gradients are summed once a step
    pp : ranks of a pipeline, each of which holds some of the layers (the table `pipeline`)
    order : the axes in rank order, fastest first: "zyx", or names with commas, such as "z,y,x,d,cp,dp,pp" (stages outermost) and
        "z,y,x,d,pp,dp" (replicas outermost); axes that it leaves out follow
    tile : sizes of the sub-grid that one node holds, as {x = 2, y = 2}
    check : whether ranks compare every collective before it, a message each, and every 100 steps the copies of weights

    >>> GridConfig(x=2, z=4).axes
    {'x': 2, 'y': 1, 'z': 4}
    """

    x: int = 1
    y: int = 1
    z: int = 1
    d: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: str = "zyx"
    tile: dict[str, int] | None = None
    check: bool = False

    def __post_init__(self) -> None:
        for name in GRID_AXES:
            at_least(f"grid.{name}", getattr(self, name), 1, MOST_RANKS)

    @property
    def outer(self) -> int:
        """Number of parts of the job with a grid of x, y, z and d of their own: contexts, replicas, ranks of a pipeline."""
        return self.cp * self.ep * self.dp * self.pp

    @property
    def replicas(self) -> int:
        """Number of parts of the job with rows of their own: those of dp and ep."""
        return self.dp * self.ep

    @property
    def axes(self) -> dict[str, int]:
        """Axis name → size: x, y and z always, the others where their size exceeds 1."""
        sizes = {name: getattr(self, name) for name in GRID_AXES}
        return {name: size for name, size in sizes.items() if name in ("x", "y", "z") or size > 1}

    @property
    def rank_order(self) -> tuple[str, ...]:
        """The axes of `axes` that `order` names, fastest first.

        >>> GridConfig(x=2, y=2, z=2, order="z,y,x,d,dp,pp").rank_order
        ('z', 'y', 'x')
        """
        absent = {name for name in GRID_AXES if name not in self.axes}
        return tuple(name for name in axes_in(self.order) if name not in absent)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes.items())


@dataclass(frozen=True)
class PipelineConfig:
    """The table `pipeline`: how the layers are cut into the stages of a pipeline of grid.pp ranks, and in which order they run.

    Attributes
    ----------
    schedule : "gpipe", all forwards and then all backwards; "1f1b", a forward and a backward in turn; "interleaved", 1f1b over
        several chunks of layers a rank, which takes multiples of grid.pp as train.accumulate; "zb-h1", 1f1b that takes gradients
        of weights in idle times; "zb-v", so over two chunks a rank in a V, which takes grid.pp or more as train.accumulate
    chunks : stages of each rank; 2 or more with interleaved, 2 with zb-v, else 1
    layers : "balanced"; or the number of layers of each of the grid.pp · chunks stages, in order, such as "4,3"
    scatter : whether tensor-parallel ranks that hold copies of the residual stream (scheme oned) send a part of it each to the
        next stage, where it is gathered (Megatron-LM's scatter/gather); else each sends the whole

    >>> PipelineConfig(layers="4,3").counts
    (4, 3)
    """

    schedule: str = "1f1b"
    chunks: int = 1
    layers: str = "balanced"
    scatter: bool = True

    def __post_init__(self) -> None:
        at_least("pipeline.chunks", self.chunks, 1, MOST_LAYERS)
        if self.layers != "balanced" and any(whole(number) is None for number in self.layers.split(",")):
            raise ConfigError(f'pipeline.layers = {self.layers!r} is neither "balanced" nor numbers with commas, such as "4,3".')

    @property
    def counts(self) -> tuple[int, ...] | None:
        """The numbers of layers of the stages; None where they are balanced."""
        return None if self.layers == "balanced" else tuple(int(number) for number in self.layers.split(","))


@dataclass(frozen=True)
class MuonConfig:
    """The table `train.muon`: what train.optimizer = "muon" does with the matrices of blocks; all else is AdamW's.

    Of a fused weight, q, k and v are matrices of their own. Rate and decay are those of AdamW, `train.learning_rate` and
    `train.weight_decay`.

    Attributes
    ----------
    momentum : decay rate of the mean of gradients that is orthogonalised
    nesterov : whether the gradient is mixed into that mean once more
    steps : Newton–Schulz iterations
    coefficients : a, b, c of an iteration X ← aX + (bG + cG²)X with G = XXᵀ
    eps : the least norm that a matrix is divided by
    adjust : what the learning rate of a matrix [inputs, outputs] is multiplied by: "match_rms_adamw", 0.2·√max(inputs, outputs),
        which takes AdamW's rates; "original", √max(1, outputs / inputs)
    dtype : what Newton–Schulz is computed in: "master", the dtype of master weights, or "bfloat16", in which matrices travel too;
        results then depend on the grid beyond rounding in the last bits
    ranks : ranks that compute a matrix together: a divisor of a stage's ranks, such as "1", the matrix's owner alone, or "4"; or
        "auto", the number of fewest predicted seconds, which is 1 where there are matrices enough for all ranks

    >>> MuonConfig().momentum
    0.95
    """

    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    adjust: str = "match_rms_adamw"
    dtype: str = "master"
    ranks: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (("adjust", ADJUSTMENTS), ("dtype", ("master", "bfloat16"))):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"train.muon.{name} = {value!r} is not known. Use one of {', '.join(known)}.")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"train.muon.momentum = {self.momentum}; it must lie in [0, 1).")
        if not all(map(isfinite, self.coefficients)):
            raise ConfigError(f"train.muon.coefficients = {list(self.coefficients)}; all three must be finite.")
        at_least("train.muon.steps", self.steps, 1, MOST_ITERATIONS)
        if not 0 < self.eps < inf:
            raise ConfigError(f"train.muon.eps = {self.eps}; it must be positive and finite.")
        if self.ranks != "auto" and (whole(self.ranks) or 0) < 1:
            raise ConfigError(f'train.muon.ranks = {self.ranks!r} is neither "auto" nor a whole number from 1 on, such as "4".')

    @property
    def group(self) -> int | None:
        """Ranks that compute a matrix together; None, as many as are predicted to be the quickest."""
        return None if self.ranks == "auto" else int(self.ranks)


@dataclass(frozen=True)
class TrainConfig:
    """The table `train`: steps, batch, optimizer, evaluation, checkpoints and the sample at the end.

    Attributes
    ----------
    steps : optimizer steps of the whole run
    batch : rows (sequences) of one optimizer step on the whole grid
    accumulate : micro-batches of equal size that `batch` is divided into; each is divided over the replicas (grid.dp)
    seed : of weights, batches and dropout masks
    learning_rate : the largest learning rate, which is reached after `warmup` steps
    warmup : steps in which the rate rises linearly from 0 to `learning_rate`
    schedule : how the rate goes on after `warmup`: "cosine", half of one, or "linear", to `decay_to` at the last step;
        "constant"; "wsd" (warm-up, stable, decay), constant and then linear to `decay_to` over the last `decay_steps`
    decay_to : the fraction of `learning_rate` that the rate has at the last step
    decay_steps : steps in which "wsd" lowers the rate; with 0, the last fifth of `steps`
    optimizer : "adamw"; "muon", for the matrices of blocks (table `train.muon`), with AdamW for embeddings, head and vectors
    weight_decay : decay of matrices; vectors (γ, β, biases) do not decay
    betas : AdamW's decay rates of the means of gradients and of their squares
    epsilon : added to AdamW's denominator
    clip : largest global gradient norm; 0 turns clipping off
    evaluate_every : steps between two evaluations; with 0, only the last step is evaluated
    checkpoint_every : steps between two checkpoints; with 0, only the last step is saved
    background : whether threads write checkpoints while steps go on, from a copy on the host; else the run waits for each. The
        last one, and that of a run which is asked to end, is always waited for
    evaluate_batches : held-out batches of one evaluation
    keep : checkpoints kept; with 0, none is written
    sample_tokens : tokens by which a causal model continues each prompt when the run ends; with 0, there is no sample
    sample_prompt : the text that is continued
    sample_prompts : further texts, each continued by itself
    sample_every : steps between two samples while the run goes on, kept in metrics.jsonl; with 0, only the end has one
    signal : a signal that asks the run to save and to end with status 75, as SIGTERM does, such as "SIGUSR1"; "" for none
    watchdog : seconds without a completed step after which the job is ended, and those for which a rank may be stopped or asleep;
        0 turns the watchdog off. SUMMA3D_WATCHDOG, where it is set, is taken in its place
    peak_tflops : TFLOP/s of one rank, against which model FLOPs utilization (MFU) is reported; with 0, a product is measured
    tensorboard : whether TensorBoard's events are written to the run folder
    """

    steps: int = 300
    batch: int = 16
    accumulate: int = 1
    seed: int = 1
    learning_rate: float = 1e-3
    schedule: str = "cosine"
    decay_to: float = 0.1
    decay_steps: int = 0
    warmup: int = 20
    optimizer: str = "adamw"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    clip: float = 1.0
    evaluate_every: int = 0
    evaluate_batches: int = 8
    checkpoint_every: int = 0
    background: bool = True
    keep: int = 2
    sample_tokens: int = 0
    sample_prompt: str = "def "
    sample_prompts: tuple[str, ...] = ()
    sample_every: int = 0
    signal: str = ""
    watchdog: float = 600.0
    peak_tflops: float = 0.0
    tensorboard: bool = False
    muon: MuonConfig = field(default_factory=MuonConfig)

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"train.optimizer = {self.optimizer!r} is not known. Use one of {', '.join(OPTIMIZERS)}.")
        if self.schedule not in RATES:
            raise ConfigError(f"train.schedule = {self.schedule!r} is not known. Use one of {', '.join(RATES)}.")
        for name in ("steps", "batch", "accumulate", "evaluate_batches"):
            at_least(f"train.{name}", getattr(self, name), 1, LARGEST_SIZE if name == "batch" else inf)
        periods = ("evaluate_every", "checkpoint_every", "sample_every")
        for name in (*periods, "seed", "warmup", "decay_steps", "keep", "sample_tokens", "watchdog"):
            at_least(f"train.{name}", getattr(self, name), 0, MOST_SECONDS if name == "watchdog" else inf)
        for name in ("learning_rate", "weight_decay", "clip", "peak_tflops"):
            at_least(f"train.{name}", getattr(self, name), 0)
        if self.batch % self.accumulate:
            fits = divisors(self.batch)
            raise ConfigError(
                f"train.batch {self.batch} cannot be divided into train.accumulate = {self.accumulate} equal micro-batches. "
                f"Values of train.accumulate that fit batch {self.batch}: {', '.join(map(str, fits))}."
            )
        if not 0 <= self.decay_to <= 1:
            raise ConfigError(f"train.decay_to = {self.decay_to}; it is a fraction of train.learning_rate, in [0, 1].")
        if self.decay_steps and (self.schedule != "wsd" or self.warmup + self.decay_steps > self.steps):
            raise ConfigError(
                f'train.decay_steps = {self.decay_steps} is of train.schedule = "wsd" (it is {self.schedule!r}), and with '
                f"train.warmup = {self.warmup} at most train.steps = {self.steps}."
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"train.betas = {list(self.betas)}; both must lie in [0, 1).")
        if not 0 < self.epsilon < inf:
            raise ConfigError(f"train.epsilon = {self.epsilon}; it must be positive and finite.")
        if self.signal not in ("", *CATCHABLE):
            raise ConfigError(
                f"train.signal = {self.signal!r} is no signal that can ask for an end. Use one of {', '.join(CATCHABLE)}."
            )
        for name, prompts in (("sample_prompt", [self.sample_prompt]), ("sample_prompts", self.sample_prompts)):
            if not all(prompts):
                raise ConfigError(f"train.{name} is empty; give at least one character to continue.")

    @property
    def copies_checkpoints(self) -> bool:
        """Return whether a checkpoint is written while steps go on."""
        return self.background and self.keep > 0 and 0 < self.checkpoint_every < self.steps

    @property
    def micro_batch(self) -> int:
        """Rows of one forward and backward pass of all replicas: batch / accumulate."""
        return self.batch // self.accumulate


@dataclass(frozen=True)
class ReplicasConfig:
    """The table `replicas`: what replicas of the model (grid.dp) keep and exchange.

    No key changes a bit of the results, but for zero 2 and 3, which add gradients in another order.

    Attributes
    ----------
    zero : 0, each replica keeps all of the optimizer's moments; 1 (ZeRO-1), they are sharded over the replicas, which moves the
        same words; 2, accumulated gradients too, (m+1)/2 times the words with m micro-batches; 3, weights too, 3m/2 times
    bucket : bytes of gradients that are summed over the replicas in one message, at least
    overlap : whether gradients are summed over replicas in the last backward of a chunk, a bucket as soon as it is complete, and
        while other chunks compute; else after all backwards. And whether weights that replicas on several nodes have updated in
        parts (zero 1 and 2) are gathered in the next forward, a layer ahead of its use; else before the step ends, as in a
        node's memory
    """

    zero: int = 1
    bucket: int = 25 << 20
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise ConfigError(
                f"replicas.zero is {self.zero}; it must be 0 (all is copied), 1 (moments are sharded), 2 (gradients too) or 3 "
                "(weights too)."
            )
        at_least("replicas.bucket", self.bucket, 1)


@dataclass(frozen=True)
class LossScaleConfig:
    """The table `loss_scale`: dynamic loss scaling of float16 runs, which keeps small gradients from underflowing to 0.

    A step whose gradients are not finite is skipped, and halves the scale. Other dtypes do not scale the loss.

    Attributes
    ----------
    initial : the number that the loss is multiplied by at first
    growth_every : good steps in a row that double the scale
    largest : the largest scale
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
    """The table `data`: the corpus, its tokenizer, and what is held out for validation.

    Attributes
    ----------
    path : "stdlib" (the Python standard library of the running interpreter), a UTF-8 text file, JSON lines (.jsonl), a folder of
        both, or token numbers (.bin) without a header
    tokenizer : "bytes"; "bpe:N" for a byte-pair encoding of N tokens that is trained on the corpus; a tokenizer.json of the
        `tokenizers` library or a Transformers folder that holds one ("bpe:N:FILE" allows it at most N tokens); or "numbers:N"
        for text that is N token numbers without a meaning
    held_out : fraction of the corpus that is kept for validation, where `validation` names nothing
    validation : what is validated on, in any form that `path` may have; all of `path` is trained on then
    key : the key of the text in a JSON line
    separator : the text that is put behind the text of each JSON line
    token_dtype : the dtype of the numbers in .bin files

    >>> DataConfig(tokenizer="bpe:4096").vocabulary
    4096
    """

    path: str = "stdlib"
    tokenizer: str = "bytes"
    held_out: float = 0.05
    validation: str | None = None
    key: str = "text"
    separator: str = "\n"
    token_dtype: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ConfigError(f"data.held_out = {self.held_out}; it must lie between 0 and 1, both excluded.")
        if self.token_dtype not in (None, *TOKEN_DTYPES):
            raise ConfigError(f"data.token_dtype = {self.token_dtype!r} is not known. Use one of {', '.join(TOKEN_DTYPES)}.")
        if self.vocabulary < 1 or (self.tokenizer.startswith("bpe:") and self.vocabulary < 256):
            raise ConfigError(
                f"data.tokenizer = {self.tokenizer!r} is not known. Use 'bytes', 'bpe:N' with N ≥ 256, 'numbers:N', "
                "or a folder with a tokenizer.json."
            )

    @property
    def vocabulary(self) -> int:
        """The number of different tokens that the tokenizer may return; 0 where it is not known."""
        name, _, rest = self.tokenizer.partition(":")
        size = rest.partition(":")[0] if name == "bpe" else rest
        if name in ("bpe", "numbers"):
            return whole(size) or 0
        return 256 if self.tokenizer == "bytes" else _vocabulary_of(self.tokenizer_file)

    @property
    def tokenizer_file(self) -> str:
        """The file that the tokenizer is read from; empty where it is not read from one."""
        return tokenizer_file(self.tokenizer)


def tokenizer_file(tokenizer: str) -> str:
    """The file that a value of `data.tokenizer` names; empty where it names none.

    >>> tokenizer_file("bpe:300:own/tokenizer.json"), tokenizer_file("bpe:300")
    ('own/tokenizer.json', '')
    """
    name, _, rest = tokenizer.partition(":")
    if name in ("bytes", "bpe", "numbers"):
        return rest.partition(":")[2] if name == "bpe" else ""
    path = Path(tokenizer)
    return str(path / "tokenizer.json" if path.is_dir() else path)


@cache
def _vocabulary_of(path: str) -> int:
    """One more than the largest token number of a tokenizer.json; 0 where there is no such file.

    Raises ConfigError where it is damaged.
    """
    if not Path(path).is_file():
        return 0
    try:
        table = read_json(Path(path))
        words = table["model"]["vocab"]
        numbers = [*(words.values() if isinstance(words, dict) else range(len(words)))]
        return 1 + max([*numbers, *(token["id"] for token in table.get("added_tokens") or ())])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"data.tokenizer = {path!r} is not a tokenizer.json of the tokenizers library ({reason}).") from error


Choose = Callable[["Config", int, Sequence[str]], tuple[str, dict[str, int]]]
"""A configuration, a number of ranks and the schemes to choose from → a scheme and the sizes of its grid.

`chosen` of the configuration says what is to be chosen; where it has REPLICAS, the sizes may have `dp`.
"""


@dataclass(frozen=True)
class Config:
    """The configuration of a run. Nested dataclasses are TOML tables.

    Attributes
    ----------
    scheme : how every tensor is sharded over the grid's axes (`nn.schemes`)
    dtype : dtype of activations and of the weights in products, and so of every all-gather, reduce-scatter and all-reduce of
        both and of their gradients. Reductions of 16-bit floats are accumulated in float32 and rounded once. The statistics of
        norms, the softmax of the loss and the loss are reduced in float32 or wider, the gradient norm in float64. With bfloat16
        and float16, master weights, accumulated gradients and the optimizer's moments are float32, in memory and in checkpoints.
    vectors : how γ, β and biases are stored: "copied" on every rank, or another form that the scheme offers
    regather : whether backward gathers operands again instead of keeping the gathered operands of forward
    recompute : "none"; "full" recomputes every `recompute_layers` layers from their input; "selective" recomputes the attention
        core alone
    recompute_layers : layers that "full" recomputes as one
    distribute_saved_activations : whether of the inputs that "full" keeps each rank keeps its part alone where several hold
        copies (scheme oned), and gathers the whole before it recomputes: memory 1/P, (P−1)/P more words of the stream a stretch.
        Other schemes keep parts as it is
    overlap : communication that is in flight during computation (`nn.overlap`)
    transport : transport of device arrays between ranks; "auto" leaves the choice to SUMMA3D_TRANSPORT, else to the library
    chosen : what `summa3d train` has chosen for its number of ranks, and chooses again for another one: "", "grid", "scheme and
        grid", "grid and replicas" or "scheme, grid and replicas"
    device : "cpu" or "cuda"; None takes SUMMA3D_DEVICE, else cpu
    tf32 : whether a device may round the operands of float32 products to TF32 (11 significant bits)

    Raises ConfigError for a value that no run can have, and for combinations of values that contradict each other.
    """

    scheme: str = "cuboid"
    dtype: str = "float32"
    regather: bool = True
    vectors: str = "copied"
    recompute: str = "none"
    recompute_layers: int = 1
    distribute_saved_activations: bool = False
    device: str | None = None
    tf32: bool = False
    transport: str = "auto"
    chosen: str = ""
    grid: GridConfig = field(default_factory=GridConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    overlap: Overlap = field(default_factory=Overlap)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    context: ContextOptions = field(default_factory=ContextOptions)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        choices = (
            ("scheme", self.scheme, SCHEMES),
            ("chosen", self.chosen, CHOSEN),
            ("dtype", self.dtype, FLOATS),
            ("recompute", self.recompute, RECOMPUTE),
            ("transport", self.transport, TRANSPORTS),
            *([] if self.device is None else [("device", self.device, DEVICES)]),
        )
        for name, value, known in choices:
            if value not in known:
                raise ConfigError(
                    f"{name} = {value!r} is not known. Nearest: {nearest(value, known)!r}. All: {', '.join(known)}."
                )
        at_least("recompute_layers", self.recompute_layers, 1)
        if self.recompute_layers > 1 and self.recompute != "full":
            raise ConfigError(
                f"recompute_layers = {self.recompute_layers} groups layers that are recomputed as a whole, which "
                f'recompute = "{self.recompute}" does not do. Set recompute to "full", or leave recompute_layers at 1.'
            )
        if self.distribute_saved_activations and self.recompute != "full":
            raise ConfigError(
                "distribute_saved_activations distributes the inputs of layers that are recomputed as a whole, which "
                f'recompute = "{self.recompute}" does not keep. Set recompute to "full", or leave distribute_saved_activations.'
            )
        self._check_pipeline()
        if self.model.family in SPECIAL_TOKENS:
            self._check_vocabulary()
        self._check_replicas()
        self._check_contexts()

    @property
    def rows(self) -> int:
        """Rows of one forward and backward pass of one replica: batch / (accumulate · dp · ep)."""
        return self.train.micro_batch // self.grid.replicas

    def overlap_on(self, on_device: bool) -> Overlap:
        """The overlap, where "auto" is decided: weights are gathered ahead on devices, if any axis or replicas share them."""
        if self.overlap.gather != AUTO:
            return self.overlap
        moves = self.replicas.zero == 3 or self.grid.axes.get("x", 1) > 1
        return replace(self.overlap, gather=int(on_device and moves))

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts that samples continue; none where there are no samples, or the model does not predict the next token."""
        settings = self.train
        sampled = settings.sample_tokens and self.model.architecture.causal
        return (settings.sample_prompt, *settings.sample_prompts) if sampled else ()

    @property
    def local_model(self) -> ModelConfig:
        """The model as a grid of x, y, z and d sees it: its sequences are the part of each that a context holds."""
        return self.model if self.grid.cp == 1 else replace(self.model, sequence=self.model.sequence // self.grid.cp)

    def _check_replicas(self) -> None:
        batch, accumulate, replicas = self.train.batch, self.train.accumulate, self.grid.replicas
        self._check_experts()
        if batch % (accumulate * replicas):
            near = batch // (accumulate * replicas) * accumulate * replicas
            batches = ", ".join(str(near + step * accumulate * replicas) for step in (0, 1, 2) if near + step)
            fits = ", ".join(map(str, divisors(batch // accumulate)))
            axes = "grid.dp" if self.grid.ep == 1 else "grid.dp · grid.ep"
            raise ConfigError(
                f"train.batch {batch} cannot be divided into train.accumulate = {accumulate} equal micro-batches on each of "
                f"{axes} = {replicas} replicas. "
                f"Batches that fit: {batches}. Values of {axes} that fit batch {batch}: {fits}."
            )

    def _check_experts(self) -> None:
        ep, experts = self.grid.ep, self.model.num_experts
        if ep > 1 and not experts:
            raise ConfigError(f"grid.ep is {ep}, but {self.model.family} has no experts to share. Set grid.dp to {ep} instead.")
        if ep > max(1, experts):
            raise ConfigError(
                f"grid.ep is {ep}, but there are model.experts = {experts}: some ranks would hold none. "
                f"Values of grid.ep that fit: 1 to {experts}."
            )

    def _check_contexts(self) -> None:
        if self.grid.cp == 1:
            return
        split = ContextSplit(self.grid.cp, 0, self.context)
        split.check_family(self.model.family, self.model.attention_dropout)
        split.check(self.model.sequence, self.model.heads)

    def check_text(self) -> None:
        """Raise ConfigError for a model that cannot be trained on text, which a dry run can take all the same."""
        if self.model.family not in SPECIAL_TOKENS:
            raise ConfigError(
                f"A {self.model.family} model cannot be trained on text. "
                f"Values of model.family that can: {', '.join(SPECIAL_TOKENS)}."
            )

    def _check_pipeline(self) -> None:
        pp, chunks = self.grid.pp, self.pipeline.chunks
        try:
            rule_of(self.pipeline.schedule, pp, self.train.accumulate, chunks)
            split_layers(self.model.layers, pp, chunks, self.pipeline.counts)
        except ConfigError as error:
            sizes = f"grid.pp = {pp}, pipeline.chunks = {chunks}, train.accumulate = {self.train.accumulate}"
            raise ConfigError(f"pipeline.schedule {self.pipeline.schedule!r} ({sizes}): {error}") from None

    def _check_vocabulary(self) -> None:
        special = SPECIAL_TOKENS[self.model.family]
        needed = self.data.vocabulary + special
        if self.model.vocabulary < needed:
            more = f" and the {special} special tokens of {self.model.family}" if special else ""
            raise ConfigError(
                f"model.vocabulary {self.model.vocabulary} is smaller than the {self.data.vocabulary} tokens of "
                f"data.tokenizer = {self.data.tokenizer!r}{more}. Set model.vocabulary to {needed} or more."
            )
        if special and self.model.sequence < special + 2:
            raise ConfigError(
                f"model.sequence is {self.model.sequence}; two pieces of text and {special} special tokens need {special + 2}."
            )


def numbers_of(model: ModelConfig) -> str:
    """The tokenizer of as many numbers as a model has token ids beside its special tokens.

    >>> numbers_of(ModelConfig(family="bert", vocabulary=30522))
    'numbers:30519'
    """
    return f"numbers:{max(1, model.vocabulary - SPECIAL_TOKENS.get(model.family, 0))}"


def master_dtype(dtype: str) -> str:
    """The dtype of master weights, accumulated gradients and optimizer moments in a run of `dtype`.

    >>> master_dtype("bfloat16"), master_dtype("float64")
    ('float32', 'float64')
    """
    return "float32" if dtype in HALVES else dtype


def at_least(key: str, value: float, minimum: float, most: float = inf) -> None:
    """Raise ConfigError unless minimum ≤ value ≤ most and value < ∞; `key` names the value in the message."""
    if not (minimum <= value <= most and isfinite(value)):
        also = ", and finite" if not isfinite(value) else f", and at most {most}" if value > most else ""
        raise ConfigError(f"{key} is {value}; it must be at least {minimum}{also}.")


def load(source: str, assignments: Sequence[str] = ()) -> Config:
    """Read a configuration and apply overrides.

    Parameters
    ----------
    source : the name of a configuration that is shipped with the package ("demo"), of a model ("llama-7b"), or the path of a TOML
        file
    assignments : overrides of the form ``key=value``, as of `--set`

    Raises ConfigError for a missing or unreadable file, an unknown key (naming the nearest known key), a value of a wrong type,
    and a value that no run can have.

    >>> load("demo", ["train.steps=20"]).train.steps
    20
    """
    table = read_table(source)
    toml.override(Config, table, assignments)
    return from_table(table)


def load_for(ranks: int, source: str, assignments: Sequence[str], choose: Choose) -> Config:
    """Read a configuration as `load`; where no size of the grid is given, `choose` names one for this number of ranks.

    A scheme that is given stays, and so do replicas. What an earlier run has chosen stays on as many ranks, and is chosen again
    on others, and where replicas or stages change what is left for it.
    """
    table, changed = read_table(source), read_table(source)
    toml.override(Config, changed, assignments)
    given = {assignment.partition("=")[0].strip() for assignment in assignments}
    if table.get("chosen") and (given & {"scheme", *SIZES} or prod(from_table(changed).grid.axes.values()) != ranks):
        before = table.pop("chosen")
        again = SIZES | ({"grid.dp"} if REPLICAS in before else set())
        table["grid"] = {key: value for key, value in table["grid"].items() if f"grid.{key}" not in again}
        if "scheme" in before and not given & SIZES:
            table.pop("scheme", None)
    toml.override(Config, table, assignments)
    config = from_table(table)
    if SIZES & {f"grid.{key}" for key in table.get("grid", {})}:
        return config
    free, outer = "scheme" not in table, config.grid.outer
    if ranks % outer:
        raise ConfigError(
            f"{counted(ranks, 'rank')} cannot be divided into {outer} equal parts "
            f"(grid.cp {config.grid.cp} · grid.ep {config.grid.ep} · grid.dp {config.grid.dp} · grid.pp {config.grid.pp}). "
            f"Numbers of ranks that fit: {', '.join(str(outer * n) for n in (ranks // outer, ranks // outer + 1) if n)}. "
            "A dry run takes --ranks."
        )
    kinds = CHOSEN[1 + free], CHOSEN[3 + free]
    asked = replace(config, chosen=kinds["dp" not in table.get("grid", {})])
    name, sizes = choose(asked, ranks // outer, SCHEMES if free else (config.scheme,))
    grid = toml.build(GridConfig, {**toml.dump(config.grid), **sizes}, "grid.")
    return replace(config, scheme=name, grid=grid, chosen=kinds["dp" in sizes])


def from_table(table: dict[str, Any]) -> Config:
    """A configuration from its TOML table."""
    return toml.build(Config, table)


def to_table(config: Config) -> dict[str, Any]:
    """The TOML table of a configuration."""
    return toml.dump(config)


def read_table(source: str) -> dict[str, Any]:
    """The TOML table of a configuration that is shipped, of a model by name, or of a file. Raises ConfigError as `load` does.

    That of a model has no corpus: its tokenizer is of as many numbers as the model has tokens.
    """
    path, models = Path(source), named_models()
    if source in models:
        tokens = numbers_of(toml.build(ModelConfig, models[source], "model."))
        return {**deepcopy(OF_NAMED_MODELS), "model": models[source], "data": {"tokenizer": tokens}}
    if (path / CONFIG).is_file():
        return of_folder(path)
    if path.suffix != ".toml" and path.name == source:
        path = NAMED_CONFIGS / f"{source}.toml"
    if not path.is_file():
        raise ConfigError(
            f"There is no configuration {source!r}: it is neither a TOML file nor one that is shipped ({', '.join(shipped())}), "
            f"nor a model ({', '.join(models)}), nor a Transformers folder. "
            f"The nearest is {nearest(source, [*shipped(), *models])!r}."
        )
    try:
        return read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the configuration {path}: {error}") from error


def of_folder(folder: Path) -> dict[str, Any]:
    """The TOML table of a configuration whose model is that of a Transformers folder, with its tokenizer and its dtype."""
    model, tokenizer = model_table(folder), folder / "tokenizer.json"
    own = f"bpe:{model['vocabulary']}:{tokenizer.resolve()}" if tokenizer.is_file() else "bytes"
    dtype = dtype_of(model["config_json"])
    return {"model": model, "data": {"tokenizer": own}, **({"dtype": dtype} if dtype in FLOATS else {})}


def shipped() -> dict[str, str]:
    """The configurations that are shipped: name → what it is, the first line of its file."""
    return titles(NAMED_CONFIGS)


def write(table: dict[str, Any], path: Path) -> None:
    """Write the TOML table of a configuration as a file, from which `load` returns an equal configuration."""
    import tomli_w

    with replacing(path) as new:
        new.write_text(tomli_w.dumps(table), encoding="utf-8")
