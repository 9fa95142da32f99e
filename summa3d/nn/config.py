"""The shape of a model as plain data, which needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

from ..comm.topology import divisors
from ..errors import ConfigError
from ..files import read_toml


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
    """

    causal: bool
    norm: str
    post_norm: bool
    activation: str
    norm_eps: float
    options: tuple[str, ...] = ()
    biases: bool = True


ROTARY = ("rotary_scaling", "rotary_factor", "rotary_low", "rotary_high", "rotary_context")
SCALINGS = {"default": (), "linear": ("rotary_factor",), "llama3": ROTARY[1:]}
"""The scalings of rotary positions for sequences longer than those first trained on, and the keys that each needs."""
IMAGE = ("image", "patch", "channels", "classes")
FAMILIES = {
    "gpt2": Architecture(True, "layer", False, "gelu_tanh", 1e-5, ("kv_heads", "activation")),
    "bert": Architecture(False, "layer", True, "gelu", 1e-12),
    "llama": Architecture(True, "rms", False, "swiglu", 1e-5, ("kv_heads", "tied_head", "rotary_base", *ROTARY), False),
    "vit": Architecture(False, "layer", False, "gelu", 1e-12, IMAGE),
}
DEFAULTS = {"rotary_base": 10000.0, "image": 32, "patch": 4, "channels": 3, "classes": 10}
ACTIVATIONS = ("gelu_tanh", "gelu", "relu2")
"""Activations of a feed-forward layer without a gate."""
OPTIONS = ("kv_heads", "activation", "tied_head", *ROTARY, *DEFAULTS)
SIZES = ("layers", "hidden", "heads", "sequence", "vocabulary", "ffn", "kv_heads", "rotary_context", *IMAGE)
REQUIRED = SIZES[:5]
"""The sizes that have no default of their family."""
MOST_LAYERS, LARGEST_SIZE = 4096, 2**31 - 1
MODELS = Path(__file__).with_name("models.toml")
COMMON = {"sequence": 2048, "vocabulary": 51200}
"""Sizes of models that are planned, named or not, and have none of their own: those of Megatron-LM's GPTs."""
ABOVE_ZERO = ("norm_eps", "rotary_base", "rotary_factor", "rotary_low", "rotary_high")


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a transformer, l layers, h hidden, a heads, f ffn, s sequence, v vocabulary.

    Parameters
    ----------
    family : "gpt2", "bert", "llama" or "vit"
    layers : the number of transformer blocks
    hidden : the width of the residual stream
    heads : the number of attention heads, which divides `hidden`
    sequence : the longest sequence; for vit always 1 + the number of patches
    vocabulary : the number of token ids; not read by vit
    kv_heads : the number of heads of k and v, each shared by heads / kv_heads query heads (gpt2, llama); default `heads`
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
    image : the side of vit's square images in pixels; default 32
    patch : the side of vit's square patches in pixels; default 4
    channels : the number of vit's colour channels; default 3
    classes : the number of vit's classes; default 10

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
    image: int | None = None
    patch: int | None = None
    channels: int | None = None
    classes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.family, str) or self.family not in FAMILIES:
            raise ConfigError(f"model.family {self.family!r} is not supported; supported: {', '.join(FAMILIES)}.")
        self._check_options()
        for name in SIZES:
            value = getattr(self, name)
            most = MOST_LAYERS if name == "layers" else LARGEST_SIZE
            if (value is not None or name in REQUIRED) and not hasattr(value, "__index__"):
                raise ConfigError(f"model.{name} is {value!r}; it must be a whole number.")
            if value is not None and not 1 <= value <= most:
                also = f", and at most {most}" if value > most else ""
                raise ConfigError(f"model.{name} is {value}; it must be at least 1{also}.")
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
        self._check_scaling()
        if self.family == "vit":
            self._settle_image()

    @property
    def architecture(self) -> Architecture:
        """The traits of the family."""
        return FAMILIES[self.family]

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
    def activation_function(self) -> str:
        """The activation of the feed-forward layer: one of ACTIVATIONS, or "swiglu"."""
        return self.architecture.activation if self.activation is None else self.activation

    @property
    def grouped(self) -> bool:
        """Whether k and v have a weight of their own, as they may have fewer heads than q."""
        return "rotary_base" in self.architecture.options or self.num_kv_heads != self.heads

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of the weights of a block, in the order of its products."""
        h, f, kv = self.hidden, self.ffn_dim, 2 * self.num_kv_heads * self.hidden // self.heads
        gates = 2 if self.architecture.activation == "swiglu" else 1
        return (h, h + kv), (h, h), (h, gates * f), (f, h)

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
        """Whether the head shares the embedding's table."""
        return bool(self.tied_head) or "tied_head" not in self.architecture.options

    @property
    def image_sizes(self) -> tuple[int, int, int, int]:
        """The image side, patch side, number of channels and number of classes of a vit."""
        given = ((name, getattr(self, name)) for name in IMAGE)
        image, patch, channels, classes = (int(DEFAULTS[name] if value is None else value) for name, value in given)
        return image, patch, channels, classes

    def _check_options(self) -> None:
        for name in OPTIONS:
            if getattr(self, name) is not None and name not in self.architecture.options:
                readers = ", ".join(family for family, architecture in FAMILIES.items() if name in architecture.options)
                if name != "kv_heads" or self.kv_heads != self.heads:
                    raise ConfigError(
                        f"model.{name} is {getattr(self, name)}, but {self.family} does not read it. "
                        f"Leave it out; it applies to {readers} only."
                    )

    def _check_heads(self) -> None:
        if self.hidden % self.heads:
            raise ConfigError(
                f"model.hidden {self.hidden} cannot be divided into model.heads {self.heads}. "
                f"Head counts that fit hidden {self.hidden}: {_divisors(self.hidden)}."
            )
        if self.heads % self.num_kv_heads:
            raise ConfigError(
                f"model.heads {self.heads} cannot be shared by model.kv_heads {self.num_kv_heads}. "
                f"kv_heads that fit heads {self.heads}: {_divisors(self.heads)}."
            )
        if "rotary_base" in self.architecture.options and (self.hidden // self.heads) % 2:
            raise ConfigError(
                f"model.hidden {self.hidden} over model.heads {self.heads} gives heads of {self.hidden // self.heads} "
                f"elements; rotary positions rotate pairs of elements, so heads need an even number of them."
            )

    def _check_scaling(self) -> None:
        if self.scaling not in SCALINGS:
            raise ConfigError(f"model.rotary_scaling {self.scaling!r} is not supported; supported: {', '.join(SCALINGS)}.")
        needed = SCALINGS[self.scaling]
        for name in ROTARY[1:]:
            given = getattr(self, name) is not None
            if given != (name in needed):
                verb = "needs" if name in needed else "does not read"
                raise ConfigError(
                    f"model.rotary_scaling {self.scaling!r} {verb} model.{name}. It needs: {', '.join(needed) or 'no other key'}."
                )
        if self.rotary_low is not None and self.rotary_high is not None and self.rotary_low >= self.rotary_high:
            raise ConfigError(f"model.rotary_low {self.rotary_low} must be below model.rotary_high {self.rotary_high}.")

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


def named_models() -> dict[str, dict[str, Any]]:
    """The models by name, as tables of a configuration's `model`.

    >>> named_models()["llama2-70b"]["kv_heads"], named_models()["gpt3-175b"]["sequence"]
    (8, 2048)
    """
    return {name: {**COMMON, **keys} for name, keys in read_toml(MODELS).items()}


def _divisors(n: int) -> str:
    """The divisors of n, as an error message lists them."""
    return ", ".join(map(str, divisors(n)))
