"""A training step of a program on devices: stages of a pipeline, contexts, replicas or shards of weights around tensor ranks."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any, NamedTuple

from ...comm.topology import Topology
from ...dry.record import ENTER, LEAVE, Op
from ...dry.step import Setting
from ...nn.config import ModelConfig
from ..cells import BLOCK, Cell, OpTrace, cells
from ..predict import PredictedStep
from ..price import move
from .edits import in_contexts, narrowed
from .experts import HALF, grouped, layout_of, of_other_ranks
from .programs import PROGRAMS, edited, edits_of
from .sizes import ffn_of, head_of, parts_of, shape_of, shards_of, stages_of

ORDER = ("y", "cp", "shards", "ep", "zero", "dp", "pp")
"""Ranks of a tensor-parallel group are neighbours, then contexts, shards of weights, replicas that share out experts, replicas
over which masters are cut, others, stages."""
OPTIMIZER_BYTES = 46
"""Bytes of memory that a step passes for each parameter: 16-bit gradient to float32 (2 + 4), unscaled (4 + 4), its norm (4), Adam
(16 read, 12 written)."""


def step(given: Mapping[str, Any]) -> PredictedStep:
    """The step of a row: profile (its program), hidden, heads, layers, tp, pp, dp, batch, micro_batch, and its sizes.

    May have chunks (1), recompute ("full"), cp (1), shards (1: of weights, gathered before use), switches, dropout (0.1).
    slots : layers' places in the pipeline that the embedding and the head take, one each. zero : 1, where each replica
    updates a part of the parameters, of all or of `zero_size` neighbours; 3, where weights are cut, too. narrow : the dtype of
    blocks' products, where that has less than 16 bits. scatter : whether messages of the pipeline travel in parts.
    """
    tp, pp, dp, chunks = given["tp"], given["pp"], given["dp"], given.get("chunks", 1)
    among = layout_of(given).among
    cut = gcd(dp // among, max(1, neighbours_of(given) // among))
    contexts, shards = given.get("cp", 1), given.get("shards", 1)
    on = on_of(given)
    stages = stages_of(given)
    ends = given["vocabulary"] * given["hidden"] // tp
    held = rank_parameters(given, max(stages) * chunks)
    words = given["micro_batch"] * given["sequence"] * given["hidden"] // contexts
    of_cells, behind = _cells(given, on), dict[tuple[str, bool], OpTrace]()
    if on.get("overlap_tp") and tp > 1:
        of_cells, behind = _in_pieces(of_cells, tp)
    for (name, backward), ops in _outside(given, on, ends).items():
        hidden = tuple(op for op in ops if on.get("prefetch", True) or op.axis == "cp")
        behind |= {(name, backward): (*behind.get((name, backward), ()), *hidden)} if hidden else {}
        of_cells[name] = _with(of_cells[name], backward, tuple(op for op in ops if op not in hidden))
    late, early, after = _after((held[0] + ends, held[1]), given, on)
    shape = {"y": tp, "cp": contexts, "shards": shards, "ep": among, "zero": cut, "dp": dp // among // cut, "pp": pp}
    messages = () if pp == 1 or (on.get("overlap_p2p") and chunks > 1) else _messages(words, tp, given.get("scatter", True))
    return PredictedStep(
        of_cells,
        Topology.checked(shape, ORDER),
        "interleaved" if chunks > 1 else "1f1b",
        stages,
        max(1, -(-given["batch"] // (dp * shards * given["micro_batch"]))),
        messages,
        after,
        bool(on.get("overlap_inputs")),
        behind,
        late,
        early,
        PROGRAMS[given["profile"]].contention,
        PROGRAMS[given["profile"]].stalls,
        PROGRAMS[given["profile"]].host,
    )


def on_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The switches of a row: its program's, and what it says itself."""
    return {**PROGRAMS[given["profile"]].switches, **given.get("switches", {})}


def _cells(given: Mapping[str, Any], on: Mapping[str, bool]) -> dict[str, Cell]:
    """The cells as the program runs them."""
    edits = edits_of(PROGRAMS[given["profile"]], on, given.get("recompute", "full"))
    edits += (in_contexts(given.get("cp", 1)),) * (given.get("cp", 1) > 1)
    of_setting = cells(setting(given))
    if given.get("experts"):
        _, _, etp = shape_of(given)
        if etp < given["tp"]:  # a rank's own rows of its micro-batches, for experts that fewer ranks split
            rows = given["sequence"] * etp // given["tp"]
            of_experts = cells(setting({**given, "tp": etp, "sequence": rows}))[BLOCK]
            of_setting = of_setting | {BLOCK: of_other_ranks(of_experts)(of_setting[BLOCK])}
        of_setting = of_setting | {BLOCK: grouped(given)(of_setting[BLOCK])}
    result = {name: edited(cell, edits) for name, cell in of_setting.items()}
    return result | {BLOCK: narrowed(given["narrow"])(result[BLOCK])} if given.get("narrow") else result


def setting(given: Mapping[str, Any]) -> Setting:
    """The cells of a row: one micro-batch, of one context, on a stage's tensor-parallel ranks."""
    tp, dropout = given["tp"], given.get("dropout", 0.1)
    kv_heads, experts = given.get("kv_heads"), {}
    if given.get("experts"):
        experts = {
            **dict.fromkeys(("experts", "experts_per_token"), given["top_k"]),
            "family": "mixtral",
            "ffn": ffn_of(given),
            **({"head_dim": given["head_dim"]} if "head_dim" in given else {}),
        }
    model = ModelConfig(
        layers=1,
        hidden=given["hidden"],
        heads=given["heads"],
        sequence=given["sequence"] // given.get("cp", 1),
        vocabulary=-(-given["vocabulary"] // tp) * tp,
        dropout=dropout,
        attention_dropout=given.get("attention_dropout", dropout),
        **({key: given[key] for key in ("family", "ffn") if key in given} | experts),
        **({"kv_heads": max(kv_heads, tp)} if kv_heads else {}),
    )
    recompute = given.get("recompute", "full")
    fused = not model.attention_dropout
    kind = "none" if recompute == "selective" and fused else recompute
    scheme = given.get("scheme", "oned")
    return Setting(model, given["micro_batch"], scheme, {"y": tp}, dtype=HALF, recompute=(kind, 1), on_device=True)


def rank_parameters(given: Mapping[str, Any], layers: int = 1) -> tuple[int, int]:
    """Parameters of so many blocks on a rank: those that all tokens meet, and those of its own experts."""
    dense, of_experts = parts_of(given)
    experts, _, etp = shape_of(given)
    own = of_experts // experts * layout_of(given).own * layers // etp if experts else 0
    return dense * layers // int(given["tp"]), own


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
        keys = 2 * given["micro_batch"] * given["sequence"] // contexts * heads * head_of(given)
        ring = [move("all_gather", "cp", times * keys * (contexts - 1), HALF) for times in (1, 3)]  # gradients in 32 bits
        result |= {(BLOCK, backward): (ring[backward],) for backward in (False, True)}
    if shards_of(given) > 1 and given["pp"] == 1:
        for name, many in ((BLOCK, rank_parameters(given)), (ENTER, (ends, 0)), (LEAVE, (ends, 0))):
            gather, total = _whole(many, given)
            result[name, False] = (*result.get((name, False), ()), gather)
            result[name, True] = (*result.get((name, True), ()), gather, total)
    return result


def _whole(many: tuple[int, int], given: Mapping[str, Any]) -> tuple[Op, Op]:
    """The gather of so many weights that are cut, other ones and experts', and the sum of their gradients."""
    shards, axis = shards_of(given), "·".join(("cp",) * (given.get("cp", 1) > 1) + ("shards",))
    parts = shards, layout_of(given).shards
    words = sum(each * (part - 1) // part for each, part in zip(many, parts, strict=True))
    return move("all_gather", axis, words, HALF), move("reduce_scatter", axis, words, PROGRAMS[given["profile"]].sums)


def neighbours_of(given: Mapping[str, Any]) -> int:
    """The replicas of dp over which masters and moments are cut, where weights are not: all, or `zero_size` neighbours."""
    whole = given.get("zero", 0) and shards_of(given) == 1
    return min(given.get("zero_size") or given["dp"], given["dp"]) if whole else 1


def owners_of(given: Mapping[str, Any]) -> int:
    """The ranks over which masters and moments are cut beside the weights: such replicas, of each context; one without ZeRO."""
    whole = given.get("zero", 0) and shards_of(given) == 1
    return neighbours_of(given) * given.get("cp", 1) if whole else 1


class WeightReplicas(NamedTuple):
    """Replicas of weights: how many, over how many of them masters and moments are cut, and the planes of both."""

    number: int
    owners: int
    sums: str
    whole: str


def replicas_of(given: Mapping[str, Any]) -> tuple[WeightReplicas, WeightReplicas]:
    """The replicas of weights that all tokens meet, which cp makes too, and of experts; as large a part of both owns masters."""
    shards = shards_of(given)
    contexts, layout = 1 if shards > 1 else given.get("cp", 1), layout_of(given)
    names = ("cp",) * (contexts > 1) + ("ep",) * (layout.among > 1)
    number, owners = given["dp"] * contexts, owners_of(given)
    dense = WeightReplicas(number, owners, "·".join((*names, "zero", "dp")), "·".join((*names, "zero")))
    return dense, WeightReplicas(layout.copies, max(1, owners * layout.copies // number), layout.sums, layout.whole)


def _after(
    held: tuple[int, int], given: Mapping[str, Any], on: Mapping[str, bool]
) -> tuple[tuple[Op, ...], tuple[Op, ...], tuple[Op, ...]]:
    """Work during the last backward, during the next forward, and after all, of a rank whose stage has `held` parameters.

    Those are the ones that all tokens meet, and its experts'.
    """
    shards = shards_of(given)
    gather, total = _whole(held, given)
    staged, prefetch, behind = shards > 1 and given["pp"] > 1, on.get("prefetch", True), on.get("overlap_gradients")
    late, early = ((total,) if staged and behind else ()), ((gather,) if staged and prefetch else ())
    after = (*((gather,) if staged and not prefetch else ()), *((total,) if staged and not behind else ()))
    cut = shards, layout_of(given).shards
    for many, parts, copies in zip(held, cut, replicas_of(given), strict=True):
        if many:
            more = _of_copies(many // parts, copies, given, on)
            late, early, after = (*late, *more[0]), (*early, *more[1]), (*after, *more[2])
    return late, early, after


def _of_copies(
    held: int, copies: WeightReplicas, given: Mapping[str, Any], on: Mapping[str, bool]
) -> tuple[tuple[Op, ...], tuple[Op, ...], tuple[Op, ...]]:
    """Return what `_after` does, of so many parameters with these replicas."""
    number, owners, late, early = copies.number, copies.owners, on.get("overlap_gradients"), on.get("overlap_parameters")
    update, dtype = optimizer(-(-held // owners)), HALF if shards_of(given) > 1 else PROGRAMS[given["profile"]].sums
    if number == 1:
        return (), (), (update,)
    words = held * (number - 1) // number
    scattered = owners == number and not (late is None and early is None)
    way = ("reduce_scatter", copies.sums, words) if scattered else ("all_reduce", copies.sums, 2 * words)
    total = (move(*way, dtype, "optimizer"),)
    gathers = _updated(held, copies.whole, owners, given) if owners > 1 else ()
    after = (*(() if late else total), update, *(() if early else gathers))
    return (total if late else ()), (gathers if early else ()), after


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
