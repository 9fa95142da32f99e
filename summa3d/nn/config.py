"""The shape of a model as plain data, which needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

from ..comm.topology import divisors
from ..errors import ConfigError
from ..files import read_toml, whole


@dataclass(frozen=True)
class Architecture:
    """The traits that all models of one family share.

    Attributes
    ----------
    causal : whether a token attends to no later token
    norm : "layer" or "rms"
    post_norm : whether norms come after the residual sum (BERT) instead of before the branch
    activation : "gelu_tanh", "gelu" or "swiglu"
    norm_eps : the default of ModelConfig.norm_eps
    options : the keys of ModelConfig that this family reads and some other family does not
    biases : whether linear layers have biases
    qk_norm : of q and k before they are rotated: "" for none; "head", a root-mean-square norm of each head; "width", one of all
    qkv_bias : the default of ModelConfig.qkv_bias
    renormalise : the default of MixtureConfig.renormalise
    shared : whether an expert with a gate of its own stands beside those that are chosen
    """

    causal: bool
    norm: str
    post_norm: bool
    activation: str
    norm_eps: float
    options: tuple[str, ...] = ()
    biases: bool = True
    qk_norm: str = ""
    qkv_bias: bool = False
    renormalise: bool = True
    shared: bool = False


ROTARY = ("rotary_scaling", "rotary_factor", "rotary_low", "rotary_high", "rotary_context")
SCALINGS = {"default": (), "linear": ("rotary_factor",), "llama3": ROTARY[1:]}
"""The scalings of rotary positions for sequences longer than those first trained on, and the keys that each needs."""
EXPERTS = ("experts", "experts_per_token", "balance")
SCORES = ("softmax", "sigmoid")
"""What makes a router's logits scores."""
FOLDER = ("folder", "config_json")
"""What a model of another library is made of."""
IMAGE = ("image", "patch", "channels", "classes")
DECODER = ("kv_heads", "tied_head", "rotary_base", *ROTARY)
"""What decoders of Llama's kind read."""
FAMILIES = {
    "gpt2": Architecture(True, "layer", False, "gelu_tanh", 1e-5, ("kv_heads", "activation")),
    "bert": Architecture(False, "layer", True, "gelu", 1e-12),
    "llama": Architecture(True, "rms", False, "swiglu", 1e-5, DECODER, False),
    "mixtral": Architecture(True, "rms", False, "swiglu", 1e-5, (*DECODER, *EXPERTS, "head_dim"), False),
    "qwen2_moe": Architecture(
        True, "rms", False, "swiglu", 1e-6, (*DECODER, *EXPERTS, "qkv_bias"), False, "", True, False, shared=True
    ),
    "qwen3_moe": Architecture(
        True, "rms", False, "swiglu", 1e-6, (*DECODER, *EXPERTS, "head_dim"), False, "head", renormalise=False
    ),
    "olmoe": Architecture(
        True, "rms", False, "swiglu", 1e-5, (*DECODER, *EXPERTS, "clip_qkv"), False, "width", renormalise=False
    ),
    "vit": Architecture(False, "layer", False, "gelu", 1e-12, IMAGE),
}
KINDS = FAMILIES | {
    "hf": Architecture(True, "rms", False, "swiglu", 1e-5, ("kv_heads", "tied_head", "head_dim", "activation", *FOLDER), False)
}
"""Our own families, and the models of Transformers folders, whose code is their own."""
DEFAULTS = {"rotary_base": 10000.0, "experts": 8, "experts_per_token": 2, "balance": 0.0}
DEFAULTS |= {"image": 32, "patch": 4, "channels": 3, "classes": 10}
ACTIVATIONS = ("gelu_tanh", "gelu", "relu2")
"""Activations of a feed-forward layer without a gate."""
OPTIONS = ("kv_heads", "activation", "tied_head", "head_dim", "qkv_bias", "clip_qkv", *FOLDER, *ROTARY, *DEFAULTS)
SIZES = (
    "layers",
    "hidden",
    "heads",
    "sequence",
    "vocabulary",
    "ffn",
    "kv_heads",
    "head_dim",
    "rotary_context",
    *EXPERTS[:2],
    *IMAGE,
)
REQUIRED = SIZES[:5]
"""The sizes that have no default of their family."""
MOST_LAYERS, LARGEST_SIZE = 4096, 2**31 - 1
MODELS = Path(__file__).with_name("models.toml")
COMMON = {"sequence": 2048, "vocabulary": 51200}
"""Sizes of models that are planned, named or not, and have none of their own: those of Megatron-LM's GPTs."""
ABOVE_ZERO = ("norm_eps", "clip_qkv", "rotary_base", "rotary_factor", "rotary_low", "rotary_high")


@dataclass(frozen=True)
class MixtureConfig:
    """The table `model.moe`: what else the experts of a model do; without experts, nothing.

    Attributes
    ----------
    width : the width of an expert's feed-forward layer; default model.ffn
    z_loss : weight of the mean square of the logarithm of the routers' sums of exponentials in the training loss; default 0
    renormalise : whether the weights of a token's experts are divided by their sum; default true (mixtral), else false
    shared : the width of the expert that every token goes to, by a gate of its own (qwen2_moe); default model.ffn
    dense : the layers that have a feed-forward layer in place of experts, by their numbers from 0, such as "0,3"; default none
    scores : "softmax" or "sigmoid", of the routers' logits; default "softmax"
    groups : groups of consecutive experts, equally many in each, that compete for a token by the sum of their two best scores;
        default 1
    groups_per_token : how many groups a token's experts are chosen from; default all
    bias_rate : adds a bias to each expert's score for the choice alone, which moves by so much after a step: up where fewer
        tokens than the mean took the expert, down where more did; default no bias
    capacity : of each sequence an expert takes at most ⌈capacity · s · experts_per_token / experts⌉ tokens, the first ones, and
        none beyond; default all
    tile : the rows of an expert are multiplied in tiles of so many on each rank, the last one padded with zeros, so that a row's
        bits do not depend on how many others there are; default all at once
    """

    width: int | None = None
    z_loss: float | None = None
    renormalise: bool | None = None
    shared: int | None = None
    dense: str | None = None
    scores: str | None = None
    groups: int | None = None
    groups_per_token: int | None = None
    bias_rate: float | None = None
    capacity: float | None = None
    tile: int | None = None

    def __post_init__(self) -> None:
        for name in ("width", "shared", "groups", "groups_per_token", "tile"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= LARGEST_SIZE:
                raise ConfigError(f"model.moe.{name} is {value}; it must be at least 1.")
        if self.dense and any(whole(number) is None for number in self.dense.split(",")):
            raise ConfigError(f'model.moe.dense is {self.dense!r}; it is numbers of layers with commas, such as "0,3".')
        if self.scores not in (None, *SCORES):
            raise ConfigError(f"model.moe.scores {self.scores!r} is not supported; supported: {', '.join(SCORES)}.")
        for name in ("z_loss", "bias_rate"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < inf:
                raise ConfigError(f"model.moe.{name} is {value}; it must be 0 or more, and finite.")
        if self.capacity is not None and not 0 < self.capacity < inf:
            raise ConfigError(
                f"model.moe.capacity is {self.capacity}; it must be above 0, and finite. Without it none is dropped."
            )

    @property
    def scored_by(self) -> str:
        """Function that makes a router's logits scores: one of SCORES."""
        return self.scores or SCORES[0]

    @property
    def competing(self) -> tuple[int, int]:
        """The groups of experts, and how many of them a token's experts are chosen from."""
        groups = self.groups or 1
        return groups, self.groups_per_token or groups


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a transformer, l layers, h hidden, a heads, f ffn, s sequence, v vocabulary.

    Parameters
    ----------
    family : "gpt2", "bert", "llama", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "vit", or "hf", that of a Transformers folder
    layers : the number of transformer blocks
    hidden : the width of the residual stream
    heads : the number of attention heads, which divides `hidden`
    sequence : the longest sequence; for vit always 1 + the number of patches
    vocabulary : the number of token ids; not read by vit
    kv_heads : the number of heads of k and v, each shared by heads / kv_heads query heads (gpt2, llama); default `heads`
    head_dim : the elements of a head (mixtral, qwen3_moe); default hidden / heads
    qkv_bias : whether q, k and v have biases (qwen2_moe); default true
    clip_qkv : the largest size of an element of q, k and v (olmoe); default unbounded
    ffn : the width of the feed-forward layer; default 4 · hidden, for llama 8/3 · hidden rounded up to a multiple of `heads`, so
        that axes that split the heads split it too
    activation : of the feed-forward layer (gpt2): "gelu_tanh", GELU by tanh; "gelu", exact; "relu2", the square of ReLU; default
        "gelu_tanh"
    dropout : of the embedding and of the two residual branches
    attention_dropout : of the attention probabilities; above 0 it disables fused attention
    norm_eps : added to a norm's variance; default 1e-5 (gpt2, llama), 1e-12 (bert, vit)
    tied_head : whether the head shares the embedding's table (llama; gpt2 and bert always share it); default false
    rotary_base : the base θ of the rotary positions (llama); default 10000
    rotary_scaling : "default"; "linear", which divides all angles by rotary_factor; or "llama3", which divides the angles of
        pairs that turn less than rotary_low times in rotary_context positions, leaves those of pairs that turn more than
        rotary_high times, and blends in between
    rotary_factor : what "linear" and "llama3" divide angles by
    rotary_low : turns below which "llama3" divides a pair's angle by rotary_factor
    rotary_high : turns above which "llama3" leaves a pair's angle
    rotary_context : the positions in which "llama3" counts turns
    experts : the number of experts of each layer (mixtral, qwen2_moe, qwen3_moe, olmoe); default 8
    experts_per_token : how many of them a token goes to (mixtral, qwen2_moe, qwen3_moe, olmoe); default 2
    balance : weight of the balance of the experts' loads in the training loss (mixtral, qwen2_moe, qwen3_moe, olmoe); default 0
    image : the side of vit's square images in pixels; default 32
    patch : the side of vit's square patches in pixels; default 4
    channels : the number of vit's colour channels; default 3
    classes : the number of vit's classes; default 10
    folder : the Transformers folder whose weights a run begins with (hf); without, or without weights in it, they are drawn
    config_json : the text of that folder's config.json (hf), which `summa3d train FOLDER` writes for itself with the sizes above
    moe : the table `model.moe`

    Raises ConfigError for sizes that do not fit each other and for keys that the family does not read.

    >>> config = ModelConfig(family="llama", hidden=64, heads=8, kv_heads=2)
    >>> config.ffn_dim, config.num_kv_heads, config.tied
    (176, 2, False)
    >>> ModelConfig(hidden=7)
    Traceback (most recent call last):
    summa3d.errors.ConfigError: model.hidden 7 cannot be divided into model.heads 8. Head counts that fit hidden 7: 1, 7.
    """

    family: str = "gpt2"
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool | None = None
    clip_qkv: float | None = None
    ffn: int | None = None
    sequence: int = 128
    vocabulary: int = 256
    activation: str | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    norm_eps: float | None = None
    tied_head: bool | None = None
    rotary_base: float | None = None
    rotary_scaling: str | None = None
    rotary_factor: float | None = None
    rotary_low: float | None = None
    rotary_high: float | None = None
    rotary_context: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    balance: float | None = None
    image: int | None = None
    patch: int | None = None
    channels: int | None = None
    classes: int | None = None
    folder: str | None = None
    config_json: str | None = None
    moe: MixtureConfig = field(default_factory=MixtureConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.family, str) or self.family not in KINDS:
            raise ConfigError(f"model.family {self.family!r} is not supported; supported: {', '.join(KINDS)}.")
        self._check_options()
        for name in SIZES:
            value = getattr(self, name)
            most = MOST_LAYERS if name == "layers" else LARGEST_SIZE
            if (value is not None or name in REQUIRED) and not hasattr(value, "__index__"):
                raise ConfigError(f"model.{name} is {value!r}; it must be a whole number.")
            if value is not None and not 1 <= value <= most:
                also = f", and at most {most}" if value > most else ""
                raise ConfigError(f"model.{name} is {value}; it must be at least 1{also}.")
        if self.family == "hf" and self.config_json is None:
            raise ConfigError("A model of family hf is that of a Transformers folder: summa3d train FOLDER.")
        self._check_heads()
        if self.activation not in (None, *ACTIVATIONS):
            raise ConfigError(f"model.activation {self.activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}.")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must lie in [0, 1).")
        for name in ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ConfigError(f"model.{name} is {value}; it must be above 0{', and finite' if value == inf else ''}.")
        _check_scaling(self)
        _check_experts(self)
        if self.family == "vit":
            self._settle_image()

    @property
    def architecture(self) -> Architecture:
        """The traits of the family."""
        return KINDS[self.family]

    @property
    def ffn_dim(self) -> int:
        """The width f of the feed-forward layer."""
        if self.ffn is not None:
            return self.ffn
        if self.architecture.activation == "swiglu":
            return -(-8 * self.hidden // (3 * self.heads)) * self.heads
        return 4 * self.hidden

    @property
    def num_kv_heads(self) -> int:
        """The number of heads of k and v."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """The number of elements of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def attention_width(self) -> int:
        """The elements of q of all heads."""
        return self.heads * self.head_size

    @property
    def has_qkv_bias(self) -> bool:
        """Return whether q, k and v have biases."""
        return self.architecture.biases or (self.architecture.qkv_bias if self.qkv_bias is None else self.qkv_bias)

    @property
    def plain_qkv(self) -> bool:
        """Return whether q, k and v have no biases."""
        return not self.has_qkv_bias

    @property
    def activation_function(self) -> str:
        """The activation of the feed-forward layer: one of ACTIVATIONS, or "swiglu"."""
        return self.architecture.activation if self.activation is None else self.activation

    @property
    def grouped(self) -> bool:
        """Return whether k and v have a weight of their own, as they may have fewer heads than q."""
        return "rotary_base" in self.architecture.options or self.num_kv_heads != self.heads

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of the weights of a block that multiply a token, in the order of its products.

        Those of its experts, the shared one among them, are as one feed-forward layer.
        """
        h, a, kv = self.hidden, self.attention_width, 2 * self.num_kv_heads * self.head_size
        f = self.num_chosen * self.expert_width + self.shared_width if self.num_experts else self.ffn_dim
        gates = 2 if self.activation_function == "swiglu" else 1
        return (h, a + kv), (a, h), (h, gates * f), (f, h)

    @property
    def block_elements(self) -> int:
        """Elements of the weights of a block: of a mixture, one with experts, all of them and its router."""
        elements, width = sum(rows * columns for rows, columns in self.matrices), self.expert_width
        if not self.num_experts:
            return elements
        return elements + (self.num_experts - self.num_chosen) * 3 * self.hidden * width + self.hidden * self.num_experts

    @property
    def eps(self) -> float:
        """The number that norms add to the variance."""
        return self.architecture.norm_eps if self.norm_eps is None else self.norm_eps

    @property
    def theta(self) -> float:
        """The base θ of the rotary positions."""
        return DEFAULTS["rotary_base"] if self.rotary_base is None else self.rotary_base

    @property
    def scaling(self) -> str:
        """The scaling of the rotary positions."""
        return self.rotary_scaling or "default"

    @property
    def tied(self) -> bool:
        """Return whether the head shares the embedding's table."""
        return bool(self.tied_head) or "tied_head" not in self.architecture.options

    @property
    def num_experts(self) -> int:
        """The number of experts of a layer; 0 in a family without."""
        if "experts" not in self.architecture.options:
            return 0
        return int(DEFAULTS["experts"]) if self.experts is None else self.experts

    @property
    def num_chosen(self) -> int:
        """To how many experts a token goes."""
        return int(DEFAULTS["experts_per_token"]) if self.experts_per_token is None else self.experts_per_token

    @property
    def expert_width(self) -> int:
        """The width of an expert's feed-forward layer."""
        return self.ffn_dim if self.moe.width is None else self.moe.width

    @property
    def renormalised(self) -> bool:
        """Return whether the weights of a token's experts are divided by their sum."""
        return self.architecture.renormalise if self.moe.renormalise is None else self.moe.renormalise

    @property
    def shared_width(self) -> int:
        """The width of the expert that every token goes to; 0 in a family without."""
        if not self.architecture.shared:
            return 0
        return self.ffn_dim if self.moe.shared is None else self.moe.shared

    @property
    def dense_layers(self) -> frozenset[int]:
        """The layers of a mixture that have a feed-forward layer in place of experts; of another model, all."""
        named = (self.moe.dense or "").split(",")
        return frozenset(int(item) for item in named if item) if self.num_experts else frozenset(range(self.layers))

    @property
    def balance_weight(self) -> float:
        """The weight of the balance loss."""
        return self.balance or 0.0

    @property
    def z_weight(self) -> float:
        """The weight of the z-loss."""
        return self.moe.z_loss or 0.0

    @property
    def image_sizes(self) -> tuple[int, int, int, int]:
        """The image side, patch side, number of channels and number of classes of a vit."""
        given = ((name, getattr(self, name)) for name in IMAGE)
        image, patch, channels, classes = (int(DEFAULTS[name] if value is None else value) for name, value in given)
        return image, patch, channels, classes

    def _check_options(self) -> None:
        for name in OPTIONS:
            if getattr(self, name) is not None and name not in self.architecture.options:
                readers = ", ".join(family for family, architecture in KINDS.items() if name in architecture.options)
                if name != "kv_heads" or self.kv_heads != self.heads:
                    raise ConfigError(
                        f"model.{name} is {getattr(self, name)}, but {self.family} does not read it. "
                        f"Leave it out; it applies to {readers} only."
                    )

    def _check_heads(self) -> None:
        if self.hidden % self.heads and self.head_dim is None:
            raise ConfigError(
                f"model.hidden {self.hidden} cannot be divided into model.heads {self.heads}. "
                f"Head counts that fit hidden {self.hidden}: {_divisors(self.hidden)}."
            )
        if self.heads % self.num_kv_heads:
            raise ConfigError(
                f"model.heads {self.heads} cannot be shared by model.kv_heads {self.num_kv_heads}. "
                f"kv_heads that fit heads {self.heads}: {_divisors(self.heads)}."
            )
        if "rotary_base" in self.architecture.options and self.head_size % 2:
            raise ConfigError(
                f"model.hidden {self.hidden} over model.heads {self.heads} gives heads of {self.head_size} "
                f"elements; rotary positions rotate pairs of elements, so heads need an even number of them."
            )

    def _settle_image(self) -> None:
        """Check the image's sizes and set `sequence` to the number of its positions."""
        image, patch, _, _ = self.image_sizes
        sequence = 1 + (image // patch) ** 2
        if image % patch:
            raise ConfigError(
                f"model.image {image} cannot be divided into patches of model.patch {patch}. "
                f"Patch sides that fit: {_divisors(image)}."
            )
        defaults = {field.name: field.default for field in fields(self)}
        if self.vocabulary != defaults["vocabulary"]:
            raise ConfigError(f"model.vocabulary is {self.vocabulary}, but vit reads no tokens. Leave it out.")
        if self.sequence not in (defaults["sequence"], sequence):
            raise ConfigError(
                f"model.sequence is {self.sequence}, but an image of {image} in patches of {patch} makes "
                f"{sequence} positions. Leave it out."
            )
        super().__setattr__("sequence", sequence)  # frozen from here on


def _check_scaling(model: ModelConfig) -> None:
    """Raise ConfigError for a scaling of rotary positions that is not known, or whose keys are not those that it reads."""
    if model.scaling not in SCALINGS:
        raise ConfigError(f"model.rotary_scaling {model.scaling!r} is not supported; supported: {', '.join(SCALINGS)}.")
    needed = SCALINGS[model.scaling]
    for name in ROTARY[1:]:
        given = getattr(model, name) is not None
        if given != (name in needed):
            verb = "needs" if name in needed else "does not read"
            raise ConfigError(
                f"model.rotary_scaling {model.scaling!r} {verb} model.{name}. It needs: {', '.join(needed) or 'no other key'}."
            )
    if model.rotary_low is not None and model.rotary_high is not None and model.rotary_low >= model.rotary_high:
        raise ConfigError(f"model.rotary_low {model.rotary_low} must be below model.rotary_high {model.rotary_high}.")


def _check_experts(model: ModelConfig) -> None:
    """Raise ConfigError for sizes of experts that no model has, and for those of a family without."""
    if not model.num_experts and model.moe != MixtureConfig():
        families = ", ".join(family for family, architecture in FAMILIES.items() if "experts" in architecture.options)
        raise ConfigError(f"The table model.moe is given, but {model.family} has no experts. It applies to {families} only.")
    if model.num_experts and model.num_chosen > model.num_experts:
        raise ConfigError(
            f"model.experts_per_token is {model.num_chosen}, but there are model.experts = {model.num_experts} to choose from. "
            f"Values that fit: 1 to {model.num_experts}."
        )
    if model.num_experts:
        _check_groups(model)
    if model.num_experts and not model.dense_layers < set(range(model.layers)):
        raise ConfigError(
            f"model.moe.dense is {model.moe.dense!r}; it names layers from 0 to {model.layers - 1}, and leaves some with experts."
        )
    if model.moe.shared is not None and not model.architecture.shared:
        raise ConfigError(f"model.moe.shared is {model.moe.shared}, but {model.family} has no shared expert. Leave it out.")
    if model.balance is not None and not 0 <= model.balance < inf:
        raise ConfigError(f"model.balance is {model.balance}; it must be 0 or more, and finite.")


def _check_groups(model: ModelConfig) -> None:
    (groups, of_token), experts = model.moe.competing, model.num_experts
    if experts % groups:
        raise ConfigError(
            f"model.moe.groups is {groups}, which does not divide model.experts = {experts}. "
            f"Numbers of groups that fit: {_divisors(experts)}."
        )
    if of_token > groups:
        raise ConfigError(f"model.moe.groups_per_token is {of_token}; of model.moe.groups = {groups} it is 1 to {groups}.")
    if of_token * (experts // groups) < model.num_chosen:
        raise ConfigError(
            f"model.moe.groups_per_token is {of_token}: so many groups of {experts // groups} experts are fewer than "
            f"model.experts_per_token = {model.num_chosen}. It is {-(-model.num_chosen * groups // experts)} to {groups}."
        )


def named_models() -> dict[str, dict[str, Any]]:
    """The models by name, as tables of a configuration's `model`.

    >>> named_models()["llama2-70b"]["kv_heads"], named_models()["gpt3-175b"]["sequence"]
    (8, 2048)
    """
    return {name: {**COMMON, **keys} for name, keys in read_toml(MODELS).items()}


def _divisors(n: int) -> str:
    """The divisors of n, as an error message lists them."""
    return ", ".join(map(str, divisors(n)))
