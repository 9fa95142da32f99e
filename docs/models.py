"""Prints docs/models.md: every family's call, parameters and their layouts, from the very code that runs.

`python docs/models.py > docs/models.md`; a test compares the two.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from summa3d.comm.grid import Place
from summa3d.layout import Layout
from summa3d.nn import Context, ModelConfig, scheme
from summa3d.nn.config import FAMILIES
from summa3d.nn.models.registry import MODELS

SIZES = {"h": 32, "f": 88, "s": 24, "v": 80}
OPTIONS = {
    "llama": {"kv_heads": 4},
    **{name: {"kv_heads": 4, "experts": 1, "experts_per_token": 1} for name in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")},
    "vit": {"image": 12, "patch": 3, "channels": 3, "classes": 10},
}
SYMBOLS = {32: "h", 88: "f", 24: "s", 80: "v", 96: "3h", 27: "c·p²", 17: "1 + n", 10: "classes", 2: "2"}
SYMBOLS |= {1: "E", 4: "d", 16: "kv·d"}
GROUPED = {"attention.kv.weight": "2·kv·d", "attention.kv.bias": "2·kv·d", "attention.k_norm.weight": "kv·d"}
GRID = {"x": 2, "y": 2, "z": 2}
SCHEMES = ("cuboid", "summa")
HEADING = """# The models, parameter by parameter

One block, one embedding, one loss; a family says how a block is built and what stands before and after the blocks. Names and
global shapes never depend on scheme, grid or ranks: checkpoints hold them as they stand here, weights as [in, out].
`python docs/models.py` prints this page from the code that runs, and a test compares.

l layers, h hidden, a heads of d = h/a, f feed-forward width, s sequence, v vocabulary, kv heads of k and v. A layout's dims
stand side by side: `(z,x) y` is split by z, then by x, along dim 0, and by y along dim 1; `·` is whole. QKV columns are ordered
`[head][q, k, v][d]`, kv columns `[kv head][k, v][d]`, patches `[channel][row][column]`. Every matrix decays, no vector does.

`nn.build(config, scheme, dtype, seed)` makes the model of `config.family`. All arguments of a loss are global tensors, equal on
every rank; it is the global mean on every rank.
"""
NOTES = {
    "gpt2": "Learned positions, layer norms before the branches, GELU by tanh, the head tied to the embedding. With "
    "`activation` exact GELU, or squared ReLU. With fewer `kv_heads` than heads, `attention.q` [h, h] and "
    "`attention.kv` [h, 2·kv·d], each with a bias, stand in the place of `attention.qkv`, as in llama.",
    "bert": "Bidirectional; token types; norms after the residual sums; exact GELU. `labels` are the true tokens where they are "
    "masked; `relation` says whether the second sentence follows (0) or not (1).",
    "llama": "Rotary positions in the half-split order, RMSNorm, SwiGLU, no biases, a head of its own unless `tied_head`. "
    "q and kv, gate and up, are one product each. Each rank holds whole kv heads with their query heads, as evenly as they come; "
    "where kv heads divide the ranks, each rank holds a piece of a head, and those that share it gather it.",
    "mixtral": "A llama whose feed-forward layers are E experts, J from 0; each token goes to the k = `experts_per_token` that "
    "its router scores best, ties to the lower number, weighted by their scores divided by the sum of these. `balance` and "
    "`moe.z_loss` add router losses to the loss of training. An expert's weights lie as those of a feed-forward layer.",
    "qwen2_moe": "A mixtral with biases of q, k and v, weights that are the scores as they are, and an expert that every token "
    "goes to by a gate of its own.",
    "qwen3_moe": "A mixtral whose q and k are normed head by head before they are rotated, with weights that are the scores as "
    "they are, unless `moe.renormalise`.",
    "olmoe": "A mixtral whose q and k are normed over all heads before they are rotated, and may be clipped (`clip_qkv`), with "
    "weights that are the scores as they are.",
    "vit": "Patches through one linear, a class token before them, norms before the branches, exact GELU, a classifier of the "
    "class token. n patches of c channels and p×p pixels; s = 1 + n.",
}


def config_of(family: str) -> ModelConfig:
    tokens = {} if family == "vit" else {"sequence": SIZES["s"], "vocabulary": SIZES["v"]}
    return ModelConfig(family=family, layers=1, hidden=SIZES["h"], heads=8, ffn=SIZES["f"], **tokens, **OPTIONS.get(family, {}))


def split(layout: Layout) -> str:
    """(z,x) y"""
    return " ".join({0: "·", 1: "".join(axes)}.get(len(axes), f"({','.join(axes)})") for axes in layout.dims)


def shape_of(name: str, shape: tuple[int, ...]) -> str:
    """[h, 3h]"""
    symbols = [SYMBOLS[size] for size in shape]
    for ending, columns in GROUPED.items():
        if name.endswith(ending) and symbols[-1] != "d":
            symbols[-1] = columns
    if name.endswith("shared_gate.weight"):
        symbols[-1] = "1"
    return f"[{', '.join(symbols)}]"


def call(family: str) -> str:
    """model(tokens, labels, step=0, …)"""
    parameters = list(inspect.signature(MODELS[family].forward).parameters.values())[1:]
    return f"model({', '.join(p.name if p.default is p.empty else f'{p.name}={p.default}' for p in parameters)})"


def family_page(family: str) -> Iterator[str]:
    """One family's call and its parameters."""
    places: list[Context] = [scheme(name, Place({**GRID, "z": 1} if name == "summa" else GRID)) for name in SCHEMES]
    models = [MODELS[family](config_of(family), place) for place in places]
    yield f"\n## `{family}`: {type(models[0]).__name__}\n\n{NOTES[family]}\n\n`{call(family)}`\n"
    yield f"| parameter | shape | {' | '.join(SCHEMES)} |"
    yield f"|---|---|{'---|' * len(SCHEMES)}"
    for name, parameter in models[0].named_parameters():
        layouts = [split(model.get_parameter(name).sharding.layout) for model in models]
        shown = name.replace("blocks.0.", "blocks.N.").replace("experts.0.", "experts.J.")
        yield f"| {shown} | {shape_of(name, parameter.sharding.shape)} | {' | '.join(layouts)} |"


def page() -> str:
    """The whole page."""
    return HEADING + "\n".join(line for family in FAMILIES for line in family_page(family)) + "\n"


if __name__ == "__main__":
    print(page(), end="")
