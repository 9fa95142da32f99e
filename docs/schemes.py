"""Prints docs/schemes.md: every scheme's layouts, local shapes and words for one small model, from the very code that runs.

`python docs/schemes.py > docs/schemes.md`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from summa3d.comm.topology import describe
from summa3d.dry.place import DryPlace
from summa3d.dry.record import Op
from summa3d.dry.step import counts, inputs
from summa3d.dry.trace import Tracer
from summa3d.layout import Layout
from summa3d.nn import MLP, ModelConfig, Scheme, build, scheme
from summa3d.nn.schemes.registry import row_axes

BATCH, SEQUENCE = 8, 8
CONFIG = ModelConfig(layers=1, hidden=16, heads=8, ffn=48, sequence=SEQUENCE, vocabulary=40)
GRIDS = {
    "serial": {"x": 1, "y": 1, "z": 1},
    "oned": {"y": 4},
    "oned-sp": {"y": 4},
    "summa": {"x": 2, "y": 2},
    "summa-transposed": {"x": 2, "y": 2},
    "tesseract": {"x": 2, "y": 2, "d": 2},
    "cuboid": {"x": 2, "y": 2, "z": 2},
    "cuboid-sequence": {"x": 2, "y": 2, "z": 2},
    "agarwal": {"x": 2, "y": 2, "z": 2},
}
HEADING = f"""# The schemes, stage by stage

One transformer, written once; a scheme says which grid axes split which dim, and which product joins them. This page shows
every scheme's layouts for one small model: b = {BATCH}, s = {SEQUENCE}, h = {CONFIG.hidden}, a = {CONFIG.heads}, \
f = {CONFIG.ffn_dim}, v = {CONFIG.vocabulary}.
`python docs/schemes.py` prints it from the code that runs, and a test compares.

`b:(d,x)` reads: dim b is split by axis d, each part then by x; a dim without axes is whole on every rank, and an axis that
appears nowhere holds equal copies; `@y=0` is held at y = 0 alone. *words* are what a rank receives there in a forward pass,
averaged over the ranks; a weight's line has its product's, the table's that of the lookup. *backward* has that of both gradients,
gathered operands gathered again; of the table with that of the learned positions.
Vectors (γ, β, biases) are split as the last dim of what they are added to, and copied on the other axes. Backward sums the
gradients of all vectors of a block that are copied over the same axes of rows in one all-reduce, which the tables leave out.
"""
NOTES = {
    "serial": "One rank: the cuboid of 1×1×1.",
    "oned": "Megatron's 1-D: the residual stream is whole on every rank; the column product moves nothing forward and "
    "all-reduces dX, the row product all-reduces its output. Forward 4(P−1)/P·E words a block (E = bsh), backward as much.",
    "oned-sp": "The same with sequence parallelism: the sequence-fine cuboid of 1×t×1. Activations are stored [s, b, n], so that "
    "gathers and scatters over s are contiguous.",
    "summa": "2-D on any R×C: panels of X are broadcast along y, of W along x. Forward [(C−1)7E + (R−1)12h²]/P words a block, "
    "backward twice that.",
    "summa-transposed": "The same, but the down projection is a product with its transpose, which moves its output's words, a "
    "quarter of its input's. Forward [(C−1)4E + (R−1)12h²]/P words a block.",
    "tesseract": "2.5-D on q×q×d: the 2-D scheme on each depth, which holds its own rows and a copy of the weights; their "
    "gradients are summed over d. Forward (q−1)/q²·(7E/d + 12h²) words a block.",
    "cuboid": "3-D on any X×Y×Z, batch-fine: X is gathered along y, W along x, Y summed along z and scattered; after each "
    "product y and z change places. Whole sequences everywhere.",
    "cuboid-sequence": "3-D on any X×Y×Z, for batches too small to be split by two axes: in the residual stream y splits s, "
    "inside attention and feed-forward (y,z) split heads and columns. Stored [s, b, n]. The same words.",
    "agarwal": "3-D as first published, on q×q×q, for `nn.MLP` alone: every operand lies on one face of the cube and the "
    "other ranks hold nothing of it; it is broadcast from there. The cuboid's words, on a few ranks' memory.",
}


def split(dims: str, layout: Layout) -> str:
    """b:(x,y) s h:z, and m:x h:z @y=0 where a face of the grid holds all."""
    return str(layout.named(*dims))


def stages(scheme: Scheme) -> Iterator[tuple[str, str, Layout, tuple[int, ...], str]]:
    """Stage, letters of its dims, layout, global shape, and the part of the model that is spent there."""
    b, s, h, f, v = BATCH, SEQUENCE, CONFIG.hidden, CONFIG.ffn_dim, CONFIG.vocabulary
    stream, inner = scheme.residual, scheme.after_linear(scheme.residual)
    down = scheme.weight(inner, scheme.spec.transposed_down)
    if scheme.spec.limits:
        yield "input", "mh", stream, (b * s, h), ""
        yield "up weight", "hf", scheme.weight(stream), (h, f), "up"
        yield "GELU", "mf", inner, (b * s, f), ""
        yield "down weight", "fh", down, (f, h), "down"
        yield "output", "mh", stream, (b * s, h), ""
        return
    yield "tokens looked up", "bs", scheme.lookup.tokens, (b, s), ""
    yield "embedding table", "vh", scheme.table(stream), (v, h), "embedding"
    yield "residual stream", "bsh", stream, (b, s, h), ""
    yield "norm's statistics, γ", "h", scheme.vector(stream), (h,), "norm"
    yield "QKV weight", "hn", scheme.weight(stream), (h, 3 * h), "qkv"
    yield "QKV, heads", "bsn", inner, (b, s, 3 * h), ""
    yield "projection weight", "nh", scheme.weight(inner), (h, h), "projection"
    yield "residual stream", "bsh", stream, (b, s, h), ""
    yield "up weight", "hf", scheme.weight(stream), (h, f), "up"
    yield "GELU", "bsf", inner, (b, s, f), ""
    yield "down weight", "fh", down, (f, h), "down"
    yield "residual stream", "bsh", stream, (b, s, h), ""
    yield "tied head and loss", "vh", scheme.table(stream), (v, h), "head"
    yield "logits", "bsv", inner, (b, s, v), ""
    yield "labels", "bs", Layout(*inner.dims[:2]), (b, s), ""


LAYERS = {
    "embedding": ("embedding", "positions"),
    "norm": ("blocks.0.attention_norm",),
    "qkv": ("blocks.0.attention.qkv",),
    "projection": ("blocks.0.attention.out",),
    "up": ("blocks.0.mlp.up", "up"),
    "down": ("blocks.0.mlp.down", "down"),
    "head": ("head", "leave"),
}
"""Parts of the page → the layers whose operations they are, in the model and in the MLP alone."""


def words(name: str, part: str, records: list[tuple[Scheme, list[Op]]]) -> tuple[float, float]:
    """Words per rank of a part, forward and backward, averaged. A linear's are its product's, without the bias."""
    totals = {"forward": 0, "backward": 0}
    for layouts, moves in records:
        rows = {"·".join(row_axes(layout)) for layout in (layouts.residual, layouts.after_linear(layouts.residual))}
        for op in moves:
            of_bias = part in ("qkv", "projection", "up", "down") and op.name == "all_reduce" and op.axis in rows
            totals[op.phase] += op.words if op.layer in LAYERS[part] and not of_bias else 0
    return totals["forward"] / len(records), totals["backward"] / len(records)


def record(name: str, rank: int) -> tuple[Scheme, list[Op]]:
    """Moves of a forward and a backward on one rank, by layer: the model's, or the MLP's where the scheme has no more."""
    tracer = Tracer()
    on = scheme(name, DryPlace(GRIDS[name], rank, ledger=tracer.ledger))
    with torch.device("meta"):
        if on.scheme.spec.limits:
            rows, shape = BATCH * SEQUENCE, (BATCH * SEQUENCE, CONFIG.hidden)
            model: torch.nn.Module = MLP(CONFIG.hidden, CONFIG.ffn_dim, on)
            block = torch.empty(on.residual.local_shape(shape, on.grid.shape, on.grid.coordinates), requires_grad=True)
            given: dict[str, Any] = {"x": block, "rows": rows}
        else:
            model, given = build(CONFIG, on), inputs(CONFIG, BATCH) | counts(CONFIG, BATCH)
    tracer.owners.follow(model, ["0"])
    with tracer.recording() as ops:
        with tracer.ledger.phase("forward"):
            y = model(**given)
        with tracer.ledger.phase("backward"):
            y.sum().backward()
    return on.scheme, [op for segments in ops for segment in segments for op in segment.ops if op.kind == "move"]


def table(name: str) -> Iterator[str]:
    on = Scheme.of(name, GRIDS[name])
    records = [record(name, rank) for rank in range(prod(GRIDS[name].values()))]
    yield f"\n## `{name}` on {describe(GRIDS[name])}\n\n{NOTES[name]}\n"
    yield "| stage | layout | block of rank 0 | words | backward |"
    yield "|---|---|---|---|---|"
    for stage, letters, layout, shape, part in stages(on):
        local = list(layout.local_shape(shape, on.shape, dict.fromkeys(on.shape, 0)))
        if on.spec.sequence_first and letters[:2] == "bs" and len(letters) == 3:
            local[:2] = local[1::-1]
            shown = f"[{', '.join(map(str, local))}] as [s, b, {letters[2]}]"
        else:
            shown = f"[{', '.join(map(str, local))}]"
        moved = [f"{count:g}" for count in words(name, part, records)] if part else ["", ""]
        yield f"| {stage} | {split(letters, layout)} | {shown} | {moved[0]} | {moved[1]} |"


def page() -> str:
    """The whole page."""
    return HEADING + "\n".join(line for name in GRIDS for line in table(name)) + "\n"


if __name__ == "__main__":
    print(page(), end="")
