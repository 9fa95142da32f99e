"""Benchmark of a ring of contexts between emulated nodes: its forward beside its arithmetic and its messages alone.

Sequences are such that both take alike on this machine: a rank's rate is measured first. Predictions are printed before a case
runs. Needs root.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from typing import Any

from common import conclude, from_nodes, from_ranks, note, options, save
from ranks import in_turn, on_machine, seconds, started, tell

NODES, PORT = (2, 4), 100e6 / 8
"""Nodes, and bytes a second of a port."""
HEADS, SIZE = 8, 64
BYTES = 2 * HEADS * SIZE * 4
"""Of the keys and values of a position."""
MORE = 1.4
"""Arithmetic ÷ messages, on a quiet machine."""
LEAST, OFF = 0.85, 0.1
SHARED = 0.85, 1.2
"""Of its prediction, what a folded ring may take where nodes share cores."""


def main() -> None:
    """Measure the ring on each number of nodes; print a row each and the claims."""
    parser = options(__doc__, 5)
    parser.add_argument("--nodes", type=int, action="append", help="Run on so many nodes alone. May be repeated.")
    parser.add_argument("--positions", type=int, help="Take so many for each context in place of measuring the rate.")
    args = parser.parse_args()
    if args.on_ranks:
        return on_a_rank(args)
    load, rows = os.getloadavg()[0], []
    for nodes in args.nodes or NODES:
        positions = args.positions or positions_of(from_ranks(2, __file__, "--on-ranks")["rate"], nodes)
        folded, unfolded = work_of(nodes)
        note(f"load {load:.1f}; {nodes} nodes, {positions} positions each; unfolded ÷ folded is to be {unfolded / folded:.2f}")
        arguments = __file__, "--on-ranks", "--positions", positions, "--rounds", args.rounds
        rows.append(from_nodes(nodes, "100mbit", *arguments))
        print(line(rows[-1]))
    save({"kind": "contexts between nodes", "load": load, "rows": rows}, args.json)
    conclude(claims(rows))


def work_of(contexts: int) -> tuple[float, float]:
    """Squares of a context's positions that the busiest one attends to, folded and not, where arithmetic takes all the time."""
    return contexts / 2, contexts - 0.5


def positions_of(rate: float, contexts: int) -> int:
    """The positions of a context whose messages take 1/MORE of its arithmetic, at pairs of a query and a key a second."""
    return max(64, int(MORE * (contexts - 1) * BYTES / PORT * rate / work_of(contexts)[0]) // 64 * 64)


def line(row: dict[str, Any]) -> str:
    """A row in milliseconds, and its ratios; `floor` is bytes ÷ bandwidth, of backward twice as many."""
    taken = {name: 1e3 * median(times) for name, times in row["seconds"].items()}
    taken["floor"] = 1e3 * row["positions"] * BYTES * (row["nodes"] - 1) / PORT
    figures = ", ".join(f"{name} {figure:.0f} ms" for name, figure in taken.items())
    before, back = taken["whole blocks"] / taken["folded"], row["reached_back"]
    ratios = f"max ÷ folded {row['reached']:.2f}, of backward {back:.2f}, whole blocks ÷ folded {before:.2f}"
    ratios += f", unfolded ÷ folded {row['unfolded']:.2f} of {row['computed']:.2f}"
    kinds = ", ".join(
        f"{kind} {taken[kind] / 1e3 / seconds:.2f} of {1e3 * seconds:.0f} ms" for kind, seconds in row["kinds"].items()
    )
    return f"{row['nodes']} nodes, {row['positions']} positions: {figures}; {ratios}; predicted: {kinds}; words {row['words']}"


def claims(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Return what must hold on nodes with a core each."""
    own, shared = ([row for row in rows if (row["nodes"] == 2) is alone] for alone in (True, False))
    return [claim for row in shared for claim in shared_claims(row)] + [
        claim
        for row in own
        for claim in (
            (f"max(arithmetic, messages) ≥ {LEAST} of the folded ring: {row['reached']:.2f}", row["reached"] >= LEAST),
            (f"and of its backward: {row['reached_back']:.2f}", row["reached_back"] >= LEAST),
            (
                f"unfolded ÷ folded within {OFF:.0%} of what is computed: {row['unfolded']:.2f}, {row['computed']:.2f}",
                abs(row["unfolded"] / row["computed"] - 1) <= OFF,
            ),
        )
    ]


def shared_claims(row: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return what must hold where nodes share cores."""
    measured, predicted = (
        sorted(row["kinds"], key=of.__getitem__) for of in ({k: median(row["seconds"][k]) for k in row["kinds"]}, row["kinds"])
    )
    asked = words_of(row["nodes"], row["positions"])
    found, (least, most) = row["as_predicted"], SHARED
    return [
        (f"words are those of the formulas: {row['words']}, {asked}", row["words"] == asked),
        (f"kinds by their times {measured}, as predicted {predicted}", measured == predicted),
        (f"the folded ring takes {least} to {most} of its prediction: {found:.2f}", least <= found <= most),
    ]


def words_of(contexts: int, positions: int) -> dict[str, int]:
    """The words of a forward pass by kind: blocks of keys and values, or parts of queries, keys, values and outputs."""
    block = 2 * HEADS * SIZE * positions
    return {"folded": (contexts - 1) * block, "gather": (contexts - 1) * block, "heads": (contexts - 1) * 2 * block // contexts}


def on_a_rank(args: Any) -> None:
    """Run on every rank: the rate of a core, or the ring; rank 0 prints JSON."""
    if args.positions is None:
        world, _ = on_machine()
        acts = acts_of(ring_of(world), 1024)
        taken = median(in_turn({"": timed(world, acts["arithmetic"])}, 5, 1)[""])
        return tell(world, {"rate": work_of(world.size)[0] * 1024**2 / taken})
    world = started()
    tell(world, measured(world, args.positions, args.rounds))


def timed(world: Any, act: Callable[[], object]) -> Callable[[], float]:
    """A stopwatch of an act on all ranks, until the last is done."""
    return lambda: world.Barrier() or seconds(lambda: (act(), world.Barrier()))


def ring_of(world: Any) -> Any:
    """A grid of all ranks along cp."""
    from summa3d.comm.grid import Grid

    return Grid(world, {"cp": world.size})


def acts_of(grid: Any, positions: int) -> dict[str, Callable[[], object]]:
    """Acts to time: the arithmetic of a folded and of an unfolded ring, the messages of one, both rings, and a folded backward.

    `whole blocks` is a folded ring whose hops are a message each; `gather` and `heads` are the other kinds' forward.
    """
    import torch

    from summa3d.nn.context_parallel import parts
    from summa3d.nn.context_parallel.attention import attend, within
    from summa3d.nn.context_parallel.heads import to_heads, to_positions
    from summa3d.nn.context_parallel.moves import GatherMoves, RingMoves
    from summa3d.nn.context_parallel.options import ContextOptions
    from summa3d.nn.context_parallel.parts import BlockPart
    from summa3d.nn.context_parallel.split import ContextSplit
    from summa3d.nn.context_parallel.tiles import AttendedSum, GradientSum

    axis = grid["cp"]
    q, kv = torch.randn(1, HEADS, positions, SIZE), torch.randn(1, HEADS, positions, 2, SIZE)
    splits = {name: ContextSplit(axis.size, axis.index, ContextOptions("ring", name == "")) for name in ("", "unfolded ")}

    def multiply(split: ContextSplit) -> None:
        found = AttendedSum(q, HEADS)
        for hop in range(axis.size):
            for tile in split.tiles((axis.index - hop) % axis.size, positions):
                found.add(kv, BlockPart.whole(kv), tile, None)

    def run(split: ContextSplit, moves: Any = RingMoves) -> None:
        with torch.no_grad():
            attend(q, kv, split, moves(axis), True, lambda tile, source: None)

    def run_heads() -> None:
        with torch.no_grad():
            parts = to_heads(q, *kv.unbind(3), axis)
            to_positions(torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True), axis)

    def run_whole() -> None:
        most, parts.MOST_PARTS = parts.MOST_PARTS, 1
        run(splits[""])
        parts.MOST_PARTS = most

    def back(moves: Any) -> None:
        found, of_kv = GradientSum(q, q, q, sums, HEADS), torch.zeros_like(kv)

        def add(source: int, part: Any, block: Any, of_block: Any) -> None:
            for tile in within(splits[""].tiles(source, positions), part):
                found.add(block, part, tile, None, of_block)

        if moves is not None:
            moves.add_gradients(kv, add)
            return
        for source in range(axis.size):
            add(source, BlockPart.whole(kv), kv, of_kv)

    sums = torch.full(q.shape[:3], 9.0)
    acts: dict[str, Callable[[], object]] = {"messages": lambda: [*RingMoves(axis).blocks(kv)]}
    for name, split in splits.items():
        acts[f"{name}arithmetic"] = lambda split=split: multiply(split)
        acts[name.strip() or "folded"] = lambda split=split: run(split)
    acts |= {"gather": lambda: run(splits[""], GatherMoves), "heads": run_heads}
    acts |= {"whole blocks": run_whole, "backward arithmetic": lambda: back(None), "backward": lambda: back(RingMoves(axis))}
    return acts


def pipelined(shares: list[float], messages: float, parts: int) -> float:
    """The seconds of a ring that attends to each part of a block once it is there; `shares`: of its own block, and of each hop's.

    Parts arrive evenly over the seconds of all messages.
    """
    many = (len(shares) - 1) * parts
    done = shares[0]
    for number in range(many):
        done = max(done, messages * (number + 1) / many) + shares[1 + number // parts] / parts
    return done


def measured(world: Any, positions: int, rounds: int) -> dict[str, Any]:
    """The seconds of all acts in turn, and what is computed of those alone; collective."""
    from summa3d.nn.context_parallel.parts import MOST_PARTS

    grid = ring_of(world)
    acts, words = acts_of(grid, positions), {}
    for kind in words_of(world.size, positions):
        acts[kind]()  # whose first calls are compared
        with grid.ledger.watch() as moved:
            acts[kind]()
        words[kind] = moved.words
    times = in_turn({name: timed(world, act) for name, act in acts.items()}, rounds, 1)
    taken = {name: median(one) for name, one in times.items()}
    hops, messages = world.size - 1, taken["messages"]
    predicted, computed = (
        pipelined(shares, messages, MOST_PARTS)
        for shares in (
            [taken["arithmetic"] / world.size] * world.size,
            [taken["unfolded arithmetic"] / (2 * hops + 1) * (1 if hop == 0 else 2) for hop in range(world.size)],
        )
    )
    return {
        "nodes": world.size,
        "positions": positions,
        "seconds": times,
        "reached": max(taken["arithmetic"], messages) / taken["folded"],
        "reached_back": max(taken["backward arithmetic"], 2 * messages) / taken["backward"],
        "unfolded": taken["unfolded"] / taken["folded"],
        "computed": computed / predicted,
        "as_predicted": taken["folded"] / predicted,
        "words": words,
        "kinds": {  # the seconds that are predicted
            "folded": predicted,
            "gather": messages + taken["arithmetic"],
            "heads": 2 * messages / world.size + taken["arithmetic"],
        },
    }


if __name__ == "__main__":
    main()
