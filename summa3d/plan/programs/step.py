"""A training step of a program on devices: stages of a pipeline, contexts, replicas or shards of weights around tensor ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...comm.topology import Topology
from ...dry.record import ENTER, LEAVE, Op
from ...dry.step import Setting
from ...layout import split_sizes
from ...nn.config import ModelConfig
from ..cells import BLOCK, Cell, OpTrace, cells
from ..predict import PredictedStep
from ..price import move
from .edits import in_contexts, in_eight_bits
from .programs import PROGRAMS, edited, edits_of

ORDER = ("y", "cp", "shards", "zero", "dp", "pp")
"""Ranks of a tensor-parallel group are neighbours, then contexts, shards of weights, replicas over which masters are cut, others,
stages."""
OPTIMIZER_BYTES = 46
"""Bytes of memory that a step passes for each parameter: 16-bit gradient to float32 (2 + 4), unscaled (4 + 4), its norm (4), Adam
(16 read, 12 written)."""
HALF = "bfloat16"
FULLY = 3
"""The stage of ZeRO that cuts weights, too."""


def step(given: Mapping[str, Any]) -> PredictedStep:
    """The step of a row: profile (its program), hidden, heads, layers, tp, pp, dp, batch, micro_batch, and its sizes.

    May have chunks (1), recompute ("full"), cp (1), shards (1: of weights, gathered before use), switches, dropout (0.1).
    slots : layers' places in the pipeline that the embedding and the head take, one each. zero : 1, where each replica
    updates a part of the parameters, of all or of `zero_size` neighbours; 3, where weights are cut, too. eight_bits : whether
    blocks' products run in 8 bits. scatter : whether messages of the pipeline travel in parts.
    """
    tp, pp, dp, chunks = given["tp"], given["pp"], given["dp"], given.get("chunks", 1)
    cut = neighbours_of(given)
    contexts, shards = given.get("cp", 1), given.get("shards", 1)
    on = on_of(given)
    stages = stages_of(given)
    ends = given["vocabulary"] * given["hidden"] // tp
    held = block_parameters(given) * max(stages) * chunks // tp + ends
    words = given["micro_batch"] * given["sequence"] * given["hidden"] // contexts
    of_cells, behind = _cells(given, on), dict[tuple[str, bool], OpTrace]()
    if on.get("overlap_tp") and tp > 1:
        of_cells, behind = _in_pieces(of_cells, tp)
    for (name, backward), ops in _outside(given, on, ends).items():
        hidden = tuple(op for op in ops if on.get("prefetch", True) or op.axis == "cp")
        behind |= {(name, backward): (*behind.get((name, backward), ()), *hidden)} if hidden else {}
        of_cells[name] = _with(of_cells[name], backward, tuple(op for op in ops if op not in hidden))
    late, early, after = _after(held, given, on)
    messages = () if pp == 1 or (on.get("overlap_p2p") and chunks > 1) else _messages(words, tp, given.get("scatter", True))
    return PredictedStep(
        of_cells,
        Topology.checked({"y": tp, "cp": contexts, "shards": shards, "zero": cut, "dp": dp // cut, "pp": pp}, ORDER),
        "interleaved" if chunks > 1 else "1f1b",
        stages,
        max(1, -(-given["batch"] // (dp * shards * given["micro_batch"]))),
        messages,
        after,
        given.get("overlap", False),
        behind,
        late,
        early,
        PROGRAMS[given["profile"]].contention,
        PROGRAMS[given["profile"]].host,
    )


def on_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The switches of a row: its program's, and what it says itself."""
    return {**PROGRAMS[given["profile"]].switches, **given.get("switches", {})}


def _cells(given: Mapping[str, Any], on: Mapping[str, bool]) -> dict[str, Cell]:
    """The cells as the program runs them."""
    edits = edits_of(PROGRAMS[given["profile"]], on, given.get("recompute", "full"))
    edits += (in_contexts(given.get("cp", 1)),) * (given.get("cp", 1) > 1)
    result = {name: edited(cell, edits) for name, cell in cells(setting(given)).items()}
    return result | {BLOCK: in_eight_bits(result[BLOCK])} if given.get("eight_bits") else result


def setting(given: Mapping[str, Any]) -> Setting:
    """The cells of a row: one micro-batch, of one context, on a stage's tensor-parallel ranks."""
    tp, dropout = given["tp"], given.get("dropout", 0.1)
    kv_heads = given.get("kv_heads")
    model = ModelConfig(
        layers=1,
        hidden=given["hidden"],
        heads=given["heads"],
        sequence=given["sequence"] // given.get("cp", 1),
        vocabulary=-(-given["vocabulary"] // tp) * tp,
        dropout=dropout,
        attention_dropout=given.get("attention_dropout", dropout),
        **{key: given[key] for key in ("family", "ffn") if key in given},
        **({"kv_heads": max(kv_heads, tp)} if kv_heads else {}),
    )
    recompute = given.get("recompute", "full")
    fused = not model.attention_dropout
    kind = "none" if recompute == "selective" and fused else recompute
    scheme = given.get("scheme", "oned")
    return Setting(model, given["micro_batch"], scheme, {"y": tp}, dtype=HALF, recompute=(kind, 1), on_device=True)


def widths_of(given: Mapping[str, Any]) -> dict[str, int]:
    """Columns of what a block's products give: Llama's with its heads of k and v and its gated feed-forward, or GPT's."""
    hidden, ffn = int(given["hidden"]), int(given.get("ffn") or 4 * given["hidden"])
    keys = hidden * (given.get("kv_heads") or given["heads"]) // given["heads"]
    gate = ffn if given.get("family") == "llama" else 0
    return {"q": hidden, "k": keys, "v": keys, "attention": hidden, "out": hidden, "gate": gate, "up": ffn, "down": hidden}


def block_parameters(given: Mapping[str, Any]) -> int:
    """Parameters of a block: all its products but down take columns of the residual stream."""
    widths = widths_of(given)
    return int(given["hidden"]) * (sum(widths[name] for name in ("q", "k", "v", "out", "gate", "up")) + widths["up"])


def stages_of(given: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers of each stage of a row."""
    stages = given["pp"] * given.get("chunks", 1)
    if PROGRAMS[given["profile"]].balanced:
        return balanced_layers(given["layers"], stages, given["vocabulary"] * given["hidden"] / block_parameters(given))
    return stage_layers(given["layers"], stages, given.get("slots", 0))


def balanced_layers(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """The layers of each stage, where a stage ends with the layer that would reach its part of all, of which the head is some.

    >>> balanced_layers(16, 4, 3.9)
    (4, 5, 5, 2)
    """
    part, result = (layers + head) / stages, [0] * stages
    stage = 0
    for layer in range(1, layers + 1):
        stage += stage < stages - 1 and layer >= part * (stage + 1)
        result[stage] += 1
    return tuple(result)


def stage_layers(layers: int, stages: int, slots: int) -> tuple[int, ...]:
    """The layers of each stage; with two `slots`, the first and the last have one less."""
    result = split_sizes(layers + slots, stages)
    if slots:
        result[0], result[-1] = result[0] - 1, result[-1] - 1
    return tuple(result)


def in_flight(ranks: int, chunks: int, micro_batches: int, rank: int = 0) -> float:
    """Micro-batches whose inputs a rank of a pipeline keeps, a fraction where it has chunks."""
    after = ranks - 1 - rank
    return min(micro_batches, (2 * after + (chunks - 1) * ranks + 1) / chunks if chunks > 1 else after + 1)


def _with(cell: Cell, backward: bool, ops: OpTrace) -> Cell:
    return cell._replace(backward=(*ops, *cell.backward)) if backward else cell._replace(forward=(*ops, *cell.forward))


def _in_pieces(of_cells: Mapping[str, Cell], pieces: int) -> tuple[dict[str, Cell], dict[tuple[str, bool], OpTrace]]:
    """Cells whose gathers and sums along y keep the first of `pieces` pieces, and the others, which run behind products."""
    kept, behind = {}, dict[tuple[str, bool], OpTrace]()
    for name, cell in of_cells.items():
        first, rest = [], []
        for trace in cell:
            first.append(tuple(op._replace(words=-(-op.words // pieces)) if op.axis == "y" else op for op in trace))
            rest.append(tuple(op._replace(words=op.words - op.words // pieces) for op in trace if op.axis == "y"))
        kept[name] = Cell(*first)
        behind |= {(name, bool(way)): ops for way, ops in enumerate(rest) if ops}
    return kept, behind


def _outside(given: Mapping[str, Any], on: Mapping[str, bool], ends: int) -> dict[tuple[str, bool], tuple[Op, ...]]:
    """Communications of cells along contexts, and shards of weights: keys and values around the ring, weights and gradients.

    In a pipeline, weights that are cut are gathered and summed once a step (`_after`).
    """
    contexts, tp = given.get("cp", 1), given["tp"]
    result: dict[tuple[str, bool], tuple[Op, ...]] = {}
    if contexts > 1:
        heads = max(given.get("kv_heads") or given["heads"], tp) // tp
        keys = 2 * given["micro_batch"] * given["sequence"] // contexts * heads * (given["hidden"] // given["heads"])
        ring = [move("all_gather", "cp", times * keys * (contexts - 1), HALF) for times in (1, 3)]  # gradients in 32 bits
        result |= {(BLOCK, backward): (ring[backward],) for backward in (False, True)}
    if shards_of(given) > 1 and given["pp"] == 1:
        for name, many in ((BLOCK, block_parameters(given) // tp), (ENTER, ends), (LEAVE, ends)):
            gather, total = _whole(many, given)
            result[name, False] = (*result.get((name, False), ()), gather)
            result[name, True] = (*result.get((name, True), ()), gather, total)
    return result


def _whole(many: int, given: Mapping[str, Any]) -> tuple[Op, Op]:
    """The gather of so many weights that are cut, and the sum of their gradients."""
    shards, axis = shards_of(given), "·".join(("cp",) * (given.get("cp", 1) > 1) + ("shards",))
    words = many * (shards - 1) // shards
    return move("all_gather", axis, words, HALF), move("reduce_scatter", axis, words, PROGRAMS[given["profile"]].sums)


def shards_of(given: Mapping[str, Any]) -> int:
    """The ranks over which weights are cut (ZeRO-3, FSDP): the shards of all contexts, which have the same weights; or 1."""
    shards = int(given.get("shards", 1))
    return shards * int(given.get("cp", 1)) if shards > 1 or given.get("zero") == FULLY else 1


def neighbours_of(given: Mapping[str, Any]) -> int:
    """The replicas of dp over which masters and moments are cut, where weights are not: all, or `zero_size` neighbours."""
    whole = given.get("zero", 0) and shards_of(given) == 1
    return min(given.get("zero_size") or given["dp"], given["dp"]) if whole else 1


def owners_of(given: Mapping[str, Any]) -> int:
    """The ranks over which masters and moments are cut beside the weights: such replicas, of each context; one without ZeRO."""
    whole = given.get("zero", 0) and shards_of(given) == 1
    return neighbours_of(given) * given.get("cp", 1) if whole else 1


def _after(held: int, given: Mapping[str, Any], on: Mapping[str, bool]) -> tuple[tuple[Op, ...], tuple[Op, ...], tuple[Op, ...]]:
    """Work during the last backward, during the next forward, and after all, of a rank whose stage has `held` parameters.

    Of replicas that cp makes too, sums go along all their axes.
    """
    shards, owners = shards_of(given), owners_of(given)
    gather, total = _whole(held, given)
    staged, prefetch, late = shards > 1 and given["pp"] > 1, on.get("prefetch", True), on.get("overlap_gradients")
    once = ((total,) if staged and late else ()), ((gather,) if staged and prefetch else ())
    exposed = (*((gather,) if staged and not prefetch else ()), *((total,) if staged and not late else ()))
    held //= shards
    contexts = 1 if shards > 1 else given.get("cp", 1)
    copies = given["dp"] * contexts
    sums, whole = "·".join(("cp",) * (contexts > 1) + ("zero", "dp")), "·".join(("cp",) * (contexts > 1) + ("zero",))
    words, early = held * (copies - 1) // copies, on.get("overlap_parameters")
    update, dtype = optimizer(-(-held // owners)), HALF if shards > 1 else PROGRAMS[given["profile"]].sums
    if copies == 1:
        return *once, (*exposed, update)
    scattered = owners == copies and not (late is None and early is None)
    total = move(*(("reduce_scatter", sums, words) if scattered else ("all_reduce", sums, 2 * words)), dtype, "optimizer")
    gathers = _updated(held, whole, owners, given) if owners > 1 else ()
    after = (*exposed, *(() if late else (total,)), update, *(() if early else gathers))
    return (*once[0], *((total,) if late else ())), (*once[1], *(gathers if early else ())), after


def _updated(held: int, axis: str, owners: int, given: Mapping[str, Any]) -> tuple[Op, ...]:
    """Bring updated parameters to all owners: by a gather, or a broadcast of each owner that has some."""
    tensors = PROGRAMS[given["profile"]].broadcasts * given["layers"] // given["pp"]
    if not tensors:
        return (move("all_gather", axis, held * (owners - 1) // owners, HALF, "optimizer"),)
    many = min(owners, tensors)
    return (move("broadcast", axis, held // many, HALF, "optimizer"),) * many


def optimizer(held: int) -> Op:
    """The update of so many parameters."""
    return Op("elements", "optimizer", "", "adam", read=OPTIMIZER_BYTES * held)


def _messages(words: int, tp: int, scatter: bool) -> tuple[Op, ...]:
    """Messages of a stage: with `scatter` each tensor rank sends its part, and the receivers gather the parts."""
    if not scatter:
        return (move("send", "pp", words, HALF),)
    return move("send", "pp", words // tp, HALF), move("all_gather", "y", words * (tp - 1) // tp, HALF)
