"""Pipeline schedules as data: which op each rank runs after which, and the messages that follow from it.

p ranks of a pipeline, m micro-batches, v chunks a rank: all count from 0. A model of p·v stages is held by the ranks, chunk c of
a rank is the c-th of its stages. Nothing here computes, communicates, or imports what does.
"""

from __future__ import annotations

import difflib
import graphlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

from ..columns import counted
from ..errors import ConfigError

ALL = -1
"""The micro-batch of an op that serves all of them: R and T."""
GRADIENT_SENDERS = ("B", "X")
GRADIENT_ENDS = ("B", "W")
"""Kinds after which a chunk's weight gradient of a micro-batch is complete."""
NEEDS = {"F": (("F", -1),), "B": (("F", 0), ("B", 1)), "W": (("B", 0),)}
"""What an op of a stage takes from an op of the same micro-batch, and how many stages further on. X needs what B needs."""


class ScheduleOp(NamedTuple):
    """One op of one rank.

    kind : F forward; B backward, of inputs and weights; X backward of inputs alone, W of weights alone; R starts the reduction
    of the chunk's gradients over replicas; T sums the gradient of a table that the first and the last stage share.
    """

    kind: str
    chunk: int
    micro: int = ALL

    def __str__(self) -> str:
        return f"{self.kind} {self.chunk}" + (f".{self.micro}" if self.micro != ALL else "")


class PipelineMessage(NamedTuple):
    """What one rank sends another: kind F, the input of a stage; B, the gradient of a stage's output. `stage` receives it."""

    kind: str
    stage: int
    micro: int
    source: int
    target: int


@cache
def held_stages(homes: tuple[int, ...], p: int) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank, one a chunk. homes : the rank of each stage."""
    return tuple(tuple(stage for stage, home in enumerate(homes) if home == rank) for rank in range(p))


@dataclass(frozen=True)
class Schedule:
    """The programs of all ranks of a pipeline.

    homes : the rank that holds each stage. programs : the ops of each rank, in order.
    """

    name: str
    p: int
    m: int
    v: int
    homes: tuple[int, ...]
    programs: tuple[tuple[ScheduleOp, ...], ...]

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, one a chunk."""
        return held_stages(self.homes, self.p)

    @cached_property
    def split(self) -> bool:
        """Return whether backward is split into gradients of inputs (X) and of weights (W)."""
        return any(op.kind == "X" for ops in self.programs for op in ops)

    def ops_of(self, rank: int) -> tuple[ScheduleOp, ...]:
        """The program of a rank."""
        return self.programs[rank]

    def received(self, rank: int, op: ScheduleOp) -> PipelineMessage | None:
        """The message that an op of a rank waits for; None where it needs none, or its input was made on the rank itself."""
        stage = self.stages[rank][op.chunk]
        if op.kind == "F":
            return self._message("F", stage, op.micro, stage - 1)
        return self._message("B", stage, op.micro, stage + 1) if op.kind in GRADIENT_SENDERS else None

    def sent(self, rank: int, op: ScheduleOp) -> PipelineMessage | None:
        """The message that an op of a rank sends; None where it sends none, or the next stage is held by the rank itself."""
        stage = self.stages[rank][op.chunk]
        if op.kind == "F":
            return self._message("F", stage + 1, op.micro, stage)
        return self._message("B", stage - 1, op.micro, stage) if op.kind in GRADIENT_SENDERS else None

    def __str__(self) -> str:
        return f"schedule {self.name} (p={self.p}, m={self.m}, v={self.v})"

    def _message(self, kind: str, stage: int, micro: int, sender: int) -> PipelineMessage | None:
        """The message from the stage `sender` to `stage`; None where one of them is not there, or both are held by one rank."""
        if min(stage, sender) < 0 or max(stage, sender) >= len(self.homes) or self.homes[stage] == self.homes[sender]:
            return None
        return PipelineMessage(kind, stage, micro, self.homes[sender], self.homes[stage])


# -- orders: the forwards and backwards of one rank ---------------------------------------------------------------------------


def gpipe(p: int, m: int, v: int, rank: int) -> list[ScheduleOp]:
    """All forwards, then all backwards. In flight: m."""
    return [ScheduleOp(kind, 0, micro) for kind in "FB" for micro in range(m)]


def one_f_one_b(p: int, m: int, v: int, rank: int) -> list[ScheduleOp]:
    """Forwards that fill the pipeline behind this rank, then a forward and a backward in turn. In flight: min(p − rank, m).

    On one rank it is the accumulation of gradients: F 0.0, B 0.0, F 0.1, B 0.1, …
    """
    forwards, backwards = ([ScheduleOp(kind, 0, micro) for micro in range(m)] for kind in "FB")
    return _in_turn(forwards, backwards, p - 1 - rank)


def interleaved(p: int, m: int, v: int, rank: int) -> list[ScheduleOp]:
    """`one_f_one_b` over v chunks, p micro-batches at a time. In flight: min(2(p − 1 − rank) + (v − 1)p + 1, mv) chunks.

    A chunk's output reaches the same rank's next chunk after p hops, and each hop takes a forward and a backward once both
    alternate: hence two forwards a rank before the first backward. m must be a multiple of p.
    """
    turns = [(chunk, first + micro) for first in range(0, m, p) for chunk in range(v) for micro in range(p)]
    forwards = [ScheduleOp("F", chunk, micro) for chunk, micro in turns]
    backwards = [ScheduleOp("B", v - 1 - chunk, micro) for chunk, micro in turns]
    return _in_turn(forwards, backwards, 2 * (p - 1 - rank) + (v - 1) * p)


def _in_turn(forwards: Sequence[ScheduleOp], backwards: Sequence[ScheduleOp], ahead: int) -> list[ScheduleOp]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    paired = zip(forwards[ahead:], backwards, strict=False)
    return [*forwards[:ahead], *(op for pair in paired for op in pair), *backwards[len(forwards) - ahead :]]


def zb_h1(p: int, m: int, v: int, rank: int) -> list[ScheduleOp]:
    """`one_f_one_b` whose gradients of weights wait, and fill what was idle: `rank` of them are always behind.

    In flight: min(p − rank, m) from F to X, at most min(p, m) from F to W. Source: Qi et al. 2024, ZB-H1.
    """
    return _first(m, *"F" * (p - 1 - rank), *"FX" * min(rank, m), *"FXW" * (m - rank), *"W" * rank)


def zb_v(p: int, m: int, v: int, rank: int) -> list[ScheduleOp]:
    """Two chunks a rank in a V (`folded`): the rank of the first stage has the last one too, and backward begins where F ends.

    In flight: min(2p, m + 1 + rank) chunks from F to W. m must be at least p. Source: Qi et al. 2024, ZB-V.
    """
    down, up = ("F0", "X0", "W0"), ("F1", "X1", "W1")
    fill = ["F0"] * (2 * (p - rank) - 1) + ["F1", "F0"] * rank + [*up] * (p - rank)
    drain = ["X0", "X1"] * rank + ["X0", "W0"] * (p - rank) + ["W1"] * rank + ["W0"] * rank
    return _first(m, *fill, *[*down, *up] * (m - p), *drain)


def _first(m: int, *kinds: str) -> list[ScheduleOp]:
    """Ops by kind and chunk (0 where it is left out), each for the next of m micro-batches, and left out behind the last."""
    following = {kind: iter(_each_micro(kind[0], int(kind[1:] or 0), m)) for kind in {*kinds}}
    ops = (next(following[kind], None) for kind in kinds)
    return [op for op in ops if op is not None]


@lru_cache(6)
def _each_micro(kind: str, chunk: int, m: int) -> tuple[ScheduleOp, ...]:
    """The op of each micro-batch, which all ranks share."""
    return tuple(ScheduleOp(kind, chunk, micro) for micro in range(m))


def looped(p: int, v: int) -> tuple[int, ...]:
    """The rank of each stage where stages go round: stage k on rank k mod p."""
    return tuple(stage % p for stage in range(p * v))


def folded(p: int, v: int) -> tuple[int, ...]:
    """The rank of each stage where stages go to the last rank and back, as a V: two that follow at a turn are held by one rank.

    >>> folded(3, 2)
    (0, 1, 2, 2, 1, 0)
    """
    return tuple(p - 1 - stage % p if stage // p % 2 else stage % p for stage in range(p * v))


# -- the registry -------------------------------------------------------------------------------------------------------------


def _single(name: str, p: int, m: int, v: int) -> str | None:
    if v == 1:
        return None
    return f"schedule {name} has one chunk a rank, not {v}. Use chunks 1, or schedule interleaved."


def _several(name: str, p: int, m: int, v: int) -> str | None:
    if v < 2:
        return f"schedule {name} needs at least 2 chunks a rank, not {v}. Use chunks 2, or schedule 1f1b."
    if m % p == 0:
        return None
    fits = ", ".join(str(p * times) for times in (m // p, m // p + 1) if times)
    return (
        f"schedule {name} takes micro-batches in groups of as many as the pipeline has ranks, and {m} is no multiple of {p}. "
        f"Numbers of micro-batches that fit: {fits}. Schedule 1f1b takes any."
    )


def _folded(name: str, p: int, m: int, v: int) -> str | None:
    if v != 2:
        return f"schedule {name} has 2 chunks a rank, not {v}. Use chunks 2, or schedule zb-h1."
    if m >= p:
        return None
    return (
        f"schedule {name} needs at least as many micro-batches as the pipeline has ranks, and {m} are fewer than {p}. "
        f"Numbers of micro-batches that fit: {p} and more. Schedule zb-h1 takes any."
    )


class ScheduleRule(NamedTuple):
    """A schedule by name: its order, the homes of its stages, and the reason why sizes do not fit it."""

    order: Callable[[int, int, int, int], list[ScheduleOp]]
    homes: Callable[[int, int], tuple[int, ...]]
    problem: Callable[[str, int, int, int], str | None]


SCHEDULES = {
    "gpipe": ScheduleRule(gpipe, looped, _single),
    "1f1b": ScheduleRule(one_f_one_b, looped, _single),
    "interleaved": ScheduleRule(interleaved, looped, _several),
    "zb-h1": ScheduleRule(zb_h1, looped, _single),
    "zb-v": ScheduleRule(zb_v, folded, _folded),
}


@cache
def is_split(name: str, p: int) -> bool:
    """Return whether a schedule of p ranks splits backward into gradients of inputs (X) and of weights (W)."""
    return p > 1 and any(op.kind == "X" for op in SCHEDULES[name].order(2, 2, 1, 0))


def rule_of(name: str, p: int, m: int, v: int = 1) -> ScheduleRule:
    """The rule of the schedule `name` on p ranks. Raises ConfigError for an unknown name, or sizes that do not fit."""
    if name not in SCHEDULES:
        nearest = difflib.get_close_matches(name.lower(), SCHEDULES, n=1, cutoff=0.4)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
        raise ConfigError(f"there is no schedule {name!r}{hint} Schedules: {', '.join(SCHEDULES)}.")
    for what, size in (("pipeline ranks", p), ("micro-batches", m), ("chunks", v)):
        if size < 1:
            raise ConfigError(f"a pipeline needs a positive number of {what}, not {size}.")
    if p == 1 and v > 1:
        raise ConfigError(f"a pipeline of one rank has one chunk, not {v}. Use chunks 1, or at least 2 pipeline ranks.")
    rule = SCHEDULES[name] if p > 1 else SCHEDULES["1f1b"]
    if (problem := rule.problem(name, p, m, v)) is not None:
        raise ConfigError(problem)
    return rule


def build(name: str, p: int, m: int, v: int = 1, replicas: bool = False, tied: bool = False) -> Schedule:
    """The schedule `name` on p ranks, checked.

    replicas : whether gradients are reduced over replicas: each rank has an R a chunk. tied : whether the first and the last
    stage share a table: the ranks that hold them have a T each, unless it is one rank.

    On one rank every schedule is the accumulation of gradients. Raises ConfigError for an unknown name, or sizes that do not fit.

    >>> [str(op) for op in build("1f1b", p=2, m=2).ops_of(1)]
    ['F 0.0', 'B 0.0', 'F 0.1', 'B 0.1']
    """
    schedule = unchecked(name, p, m, v, replicas, tied)
    check(schedule)
    return schedule


def unchecked(name: str, p: int, m: int, v: int = 1, replicas: bool = False, tied: bool = False) -> Schedule:
    """The schedule of `build`, for what does not run it: the check takes several times as long as all else."""
    rule = rule_of(name, p, m, v)
    homes = rule.homes(p, v)
    ends = (homes[0], homes[-1])
    programs = []
    for rank in range(p):
        held = held_stages(homes, p)[rank]
        table = held.index(0 if rank == ends[0] else len(homes) - 1) if tied and ends[0] != ends[1] and rank in ends else None
        ops = rule.order(p, m, v, rank)
        programs.append(tuple(ops if table is None and not replicas else _with_sums(ops, replicas, table)))
    return Schedule(name, p, m, v, homes, tuple(programs))


def in_two(schedule: Schedule) -> Schedule:
    """The schedule with each of its backwards in two ops, X and at once W."""

    def both(op: ScheduleOp) -> tuple[ScheduleOp, ...]:
        return (op._replace(kind="X"), op._replace(kind="W")) if op.kind == "B" else (op,)

    return replace(schedule, programs=tuple(tuple(item for op in ops for item in both(op)) for ops in schedule.programs))


def _with_sums(ops: Sequence[ScheduleOp], replicas: bool, table: int | None) -> Iterator[ScheduleOp]:
    """The ops, each chunk's R behind its last backward; T, and the R of the chunk that holds the table, at the end.

    T waits for the other holder, which waits for messages of this rank: behind all own ops it cannot hold them up.
    """
    last = {op.chunk: place for place, op in enumerate(ops) if op.kind in GRADIENT_ENDS}
    for place, op in enumerate(ops):
        yield op
        if replicas and place == last[op.chunk] and op.chunk != table:
            yield ScheduleOp("R", op.chunk)
    if table is not None:
        yield ScheduleOp("T", table)
        if replicas:
            yield ScheduleOp("R", table)


def split_layers(layers: int, p: int, v: int = 1, counts: Sequence[int] | None = None) -> tuple[int, ...]:
    """The number of layers of each of the p·v stages: balanced, larger ones first, or the given `counts`.

    Only the first and the last stage may have none. Raises ConfigError for what does not fit.

    >>> split_layers(7, p=3)
    (3, 2, 2)
    """
    stages = p * v
    if counts is None:
        if layers < stages:
            pairs = [(ranks, chunks) for ranks in range(p, 0, -1) for chunks in (v, 1) if ranks * chunks <= layers]
            fits = [f"{counted(ranks, 'rank')} × {chunks}" for ranks, chunks in pairs]
            raise ConfigError(
                f"{counted(layers, 'layer')} cannot fill the {stages} stages of {p} pipeline ranks × {counted(v, 'chunk')}. "
                f"What fits: {' · '.join(dict.fromkeys(fits[:3]))}."
            )
        return tuple(len(range(stage, layers, stages)) for stage in range(stages))
    counts = tuple(counts)
    if len(counts) != stages or sum(counts) != layers:
        given = f"{len(counts)} that sum to {sum(counts)}"
        raise ConfigError(
            f"{p} pipeline ranks × {v} chunks need {stages} numbers of layers that sum to {layers}; {given} were given. "
            f"The balanced split is {','.join(map(str, split_layers(layers, p, v))) if layers >= stages else 'not possible'}."
        )
    if min(counts) < 0 or 0 in counts[1:-1]:
        raise ConfigError(f"only the first and the last stage may have no layers; the numbers given are {list(counts)}.")
    return counts


# -- the check ----------------------------------------------------------------------------------------------------------------

StreamOf = Callable[[str, int, bool], Hashable]
"""(kind, peer, whether it sends) → the stream of a rank that carries a message, one message after the other."""


def pair_stream(kind: str, peer: int, sends: bool) -> Hashable:
    """A stream for each kind, peer and direction: what comm/channel.py opens on NCCL."""
    return kind, peer, sends


def check(schedule: Schedule) -> None:
    """Raise ConfigError, naming rank and op, unless every op is there once, in an order that cannot deadlock.

    Backwards of a chunk take micro-batches in order, as accumulation does: sums of gradients are then the same bits. An R comes
    behind its chunk's last backward, a T behind all other ops but the R of its chunk. Sends return at once and receives block:
    such a pipeline ends if and only if program order, data and streams leave no cycle.
    """
    kinds = {op.kind for ops in schedule.programs for op in ops}
    for rank, ops in enumerate(schedule.programs):
        problem = _counts_problem(schedule, ops) or _order_problem(ops) or _sums_problem(schedule, rank, ops, kinds)
        if problem is not None:
            raise ConfigError(f"{schedule}, rank {rank}: {problem}.")
    try:
        graphlib.TopologicalSorter(dependencies(schedule)).prepare()
    except graphlib.CycleError as error:
        circle = " ← ".join(_in_words(schedule, node) for node in error.args[1])
        raise ConfigError(f"{schedule} deadlocks: {circle}.") from None


def dependencies(schedule: Schedule, stream_of: StreamOf = pair_stream) -> dict[Any, set[Any]]:
    """Everything that happens, each with what comes directly before it: ops as (rank, place), messages, and T, which is joint."""
    before: dict[Any, set[Any]] = defaultdict(set)
    made: dict[tuple[str, int, int], Any] = {}
    last: dict[Hashable, PipelineMessage] = {}
    for rank, ops in enumerate(schedule.programs):
        previous: set[Any] = set()
        for place, op in enumerate(ops):
            node = "T" if op.kind == "T" else (rank, place)
            before[node] |= previous
            made["B" if op.kind == "X" else op.kind, schedule.stages[rank][op.chunk], op.micro] = node
            if (message := schedule.received(rank, op)) is not None:
                before[node].add(message)
                before[message] |= previous  # the receive is posted behind it
                _queue(before, last, message, (rank, stream_of(message.kind, message.source, False)))
            if (message := schedule.sent(rank, op)) is not None:
                before[message].add(node)
                _queue(before, last, message, (rank, stream_of(message.kind, message.target, True)))
            previous = {node}
    for (kind, stage, micro), node in made.items():
        for needed in NEEDS.get(kind, ()):
            if (needed[0], stage + needed[1], micro) in made:
                before[node].add(made[needed[0], stage + needed[1], micro])
    return before


def _queue(
    before: dict[Any, set[Any]], last: dict[Hashable, PipelineMessage], message: PipelineMessage, stream: Hashable
) -> None:
    """Put a message into a stream, behind the one that the stream carried last."""
    before[message] |= {last[stream]} if stream in last else set()
    last[stream] = message


def _counts_problem(schedule: Schedule, ops: Sequence[ScheduleOp]) -> str | None:
    counts = Counter(op for op in ops if op.kind not in "RT")
    split = any(op.kind == "X" for op in ops)
    expected = {
        ScheduleOp(kind, chunk, micro)
        for kind in ("FXW" if split else "FB")
        for chunk in range(schedule.v)
        for micro in range(schedule.m)
    }
    for op in sorted(expected | set(counts)):
        if counts[op] != (op in expected):
            return f"{op} is there {counts[op]} times"
    return None


def _order_problem(ops: Sequence[ScheduleOp]) -> str | None:
    latest: dict[tuple[str, int], ScheduleOp] = {}
    for place, op in enumerate(ops):
        if op.kind == "W" and (needed := op._replace(kind="X")) not in ops[:place]:
            return f"{op} comes before {needed}"
        before = latest.get((op.kind, op.chunk))
        if op.kind not in "FRT" and before is not None and before.micro > op.micro:
            return f"{op} comes after {before}, and gradients would be summed in another order"
        latest[op.kind, op.chunk] = op
    return None


def _sums_problem(schedule: Schedule, rank: int, ops: Sequence[ScheduleOp], kinds: Collection[str]) -> str | None:
    ends = (schedule.homes[0], schedule.homes[-1])
    tables = [op for op in ops if op.kind == "T"]
    if len(tables) != ("T" in kinds and rank in ends):
        return f"it has {len(tables)} ops T, and the ranks that hold a shared table, {ends[0]} and {ends[1]}, have one each"
    reductions = [op.chunk for op in ops if op.kind == "R"]
    if sorted(reductions) != (list(range(schedule.v)) if "R" in kinds else []):
        return f"it reduces the chunks {reductions}, and each rank reduces each of its {schedule.v} once, or none"
    for place, op in enumerate(ops):
        for later in ops[place + 1 :] if op.kind in "RT" else ():
            if later.kind == "T" and op.chunk == later.chunk:
                return f"{op} comes before {later}"
            if later.kind not in "RT" and (op.kind == "T" or (op.chunk == later.chunk and later.kind in GRADIENT_ENDS)):
                return f"{op} comes before {later}"
    return None


def _in_words(schedule: Schedule, node: Any) -> str:
    if node == "T":
        return "T"
    if isinstance(node, PipelineMessage):
        return f"{node.kind} {node.micro} for stage {node.stage} from rank {node.source}"
    rank, place = node
    return f"{schedule.ops_of(rank)[place]} of rank {rank}"
