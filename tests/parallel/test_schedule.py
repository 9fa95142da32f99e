"""Schedules as data: golden orders, what `check` refuses, the split of layers, and errors that name what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from summa3d.errors import ConfigError
from summa3d.layout import split_sizes
from summa3d.parallel.schedule import SCHEDULES, Schedule, ScheduleOp, build, check, folded, looped, split_layers

GOLDEN = {
    ("1f1b", 1): (
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ),
    ("gpipe", 1): ("F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7",) * 4,
    ("interleaved", 2): (
        "F0.0 F0.1 F0.2 F0.3 F1.0 F1.1 F1.2 F1.3 F0.4 F0.5 F0.6 B1.0 F0.7 B1.1 F1.4 B1.2 F1.5 B1.3 F1.6 B0.0 F1.7 B0.1 "
        "B0.2 B0.3 B1.4 B1.5 B1.6 B1.7 B0.4 B0.5 B0.6 B0.7",
        None,
        None,
        "F0.0 F0.1 F0.2 F0.3 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3 F0.4 B0.0 F0.5 B0.1 F0.6 B0.2 F0.7 B0.3 F1.4 B1.4 "
        "F1.5 B1.5 F1.6 B1.6 F1.7 B1.7 B0.4 B0.5 B0.6 B0.7",
    ),
    ("zb-h1", 1): (
        "F0 F1 F2 F3 X0 W0 F4 X1 W1 F5 X2 W2 F6 X3 W3 F7 X4 W4 X5 W5 X6 W6 X7 W7",
        None,
        None,
        "F0 X0 F1 X1 F2 X2 F3 X3 W0 F4 X4 W1 F5 X5 W2 F6 X6 W3 F7 X7 W4 W5 W6 W7",
    ),
    ("zb-v", 2): (
        "F0.0 F0.1 F0.2 F0.3 F0.4 F0.5 F0.6 F1.0 X1.0 W1.0 F1.1 X1.1 W1.1 F1.2 X1.2 W1.2 F1.3 X1.3 W1.3 F0.7 X0.0 W0.0 F1.4 "
        "X1.4 W1.4 X0.1 W0.1 F1.5 X1.5 W1.5 X0.2 W0.2 F1.6 X1.6 W1.6 X0.3 W0.3 F1.7 X1.7 W1.7 X0.4 W0.4 X0.5 W0.5 X0.6 W0.6 "
        "X0.7 W0.7",
        None,
        None,
        "F0.0 F1.0 F0.1 F1.1 F0.2 F1.2 F0.3 F1.3 X1.0 W1.0 F0.4 X0.0 W0.0 F1.4 X1.1 W1.1 F0.5 X0.1 W0.1 F1.5 X1.2 W1.2 F0.6 "
        "X0.2 W0.2 F1.6 X1.3 W1.3 F0.7 X0.3 W0.3 F1.7 X1.4 W1.4 X0.4 X1.5 X0.5 X1.6 X0.6 X1.7 X0.7 W0.4 W1.5 W1.6 W1.7 W0.5 "
        "W0.6 W0.7",
    ),
}
"""The orders of 4 ranks and 8 micro-batches; where there is one chunk, it is left out."""


def ops(text: str) -> tuple[ScheduleOp, ...]:
    """`F0.3 B1 R:0`: kind, chunk (0 where it is left out) and micro-batch; or kind and chunk."""
    found = []
    for word in text.split():
        kind, numbers = word[0], word[1:]
        if numbers.startswith(":"):
            found.append(ScheduleOp(kind, int(numbers[1:])))
        else:
            chunk, _, micro = numbers.rpartition(".")
            found.append(ScheduleOp(kind, int(chunk or 0), int(micro)))
    return tuple(found)


@pytest.mark.parametrize(("name", "chunks"), GOLDEN)
def test_orders_of_4_ranks_and_8_micro_batches(name: str, chunks: int) -> None:
    schedule = build(name, 4, 8, chunks)
    for rank, text in enumerate(GOLDEN[name, chunks]):
        assert text is None or schedule.ops_of(rank) == ops(text), rank


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_pipeline_of_one_rank_is_accumulation_and_sends_nothing(name: str) -> None:
    schedule = build(name, 1, 3, replicas=True, tied=True)
    assert schedule.ops_of(0) == ops("F0 B0 F1 B1 F2 B2 R:0")
    assert {message for op in schedule.ops_of(0)[:-1] for message in (schedule.received(0, op), schedule.sent(0, op))} == {None}


def test_stages_go_round_and_messages_follow_them() -> None:
    schedule = build("interleaved", 2, 2, 2)
    assert schedule.homes == looped(2, 2) == (0, 1, 0, 1) and schedule.stages == ((0, 2), (1, 3))
    assert schedule.received(0, ScheduleOp("F", 0, 1)) is None  # the batch is no message
    assert schedule.sent(1, ScheduleOp("F", 0, 1)) == schedule.received(0, ScheduleOp("F", 1, 1)) == ("F", 2, 1, 1, 0)
    assert schedule.sent(1, ScheduleOp("F", 1, 1)) is schedule.received(1, ScheduleOp("B", 1, 1)) is None  # the loss is at home
    assert schedule.sent(0, ScheduleOp("B", 1, 0)) == schedule.received(1, ScheduleOp("B", 0, 0)) == ("B", 1, 0, 0, 1)


def test_stages_in_a_v_meet_on_the_last_rank_and_end_on_the_first() -> None:
    schedule = build("zb-v", 3, 3, 2, replicas=True, tied=True)
    assert schedule.homes == folded(3, 2) == (0, 1, 2, 2, 1, 0) and schedule.stages == ((0, 5), (1, 4), (2, 3))
    assert (
        schedule.sent(2, ScheduleOp("F", 0, 1)) is schedule.received(2, ScheduleOp("F", 1, 1)) is None
    )  # the turn is no message
    assert schedule.sent(2, ScheduleOp("X", 1, 1)) is schedule.received(2, ScheduleOp("X", 0, 1)) is None
    assert schedule.sent(1, ScheduleOp("X", 1, 0)) == schedule.received(2, ScheduleOp("X", 1, 0)) == ("B", 3, 0, 1, 2)
    assert schedule.sent(0, ScheduleOp("X", 1, 2)) == ("B", 4, 2, 0, 1) and schedule.sent(0, ScheduleOp("F", 1, 2)) is None
    assert schedule.sent(0, ScheduleOp("W", 1, 2)) is schedule.received(0, ScheduleOp("W", 0, 2)) is None
    assert not any(op.kind == "T" for program in schedule.programs for op in program)  # one rank has the shared table
    assert all(tuple(op for op in program if op.kind == "R") == ops("R:1 R:0") for program in schedule.programs[:2])


def test_sums_come_behind_the_backwards_that_they_need() -> None:
    """A chunk that holds a shared table waits for all other ops: its sum waits for the other holder."""
    first, last = build("interleaved", 2, 2, 2, replicas=True, tied=True).programs
    assert tuple(op for op in last if op.kind in "BRT") == ops("B1.0 B1.1 B0.0 B0.1 R:0 T:1 R:1")
    assert tuple(op for op in first if op.kind in "BRT") == ops("B1.0 B1.1 R:1 B0.0 B0.1 T:0 R:0")
    untied = build("interleaved", 2, 2, 2, replicas=True).ops_of(1)
    assert tuple(op for op in untied if op.kind in "BR") == ops("B1.0 B1.1 R:1 B0.0 B0.1 R:0")


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 3), (3, 9, 2), (8, 16, 4)])
def test_a_reduction_starts_at_once_behind_its_chunks_last_backward(p: int, m: int, v: int) -> None:
    schedule = build("interleaved", p, m, v, replicas=True)
    for program in schedule.programs:
        behind = {op.chunk: sum(one.kind == "B" for one in program[:place]) for place, op in enumerate(program) if op.kind == "R"}
        assert behind == {chunk: m * v - chunk * p for chunk in range(v)}


def changed(schedule: Schedule, rank: int, text: str) -> Schedule:
    """The schedule with another program on one rank."""
    programs = list(schedule.programs)
    programs[rank] = ops(text)
    return replace(schedule, programs=tuple(programs))


@pytest.mark.parametrize(
    ("rank", "text", "problem"),
    [
        (0, "F0 F1 B0", "rank 0: B 0.1 is there 0 times"),
        (0, "F0 F1 B0 B0 B1", "rank 0: B 0.0 is there 2 times"),
        (0, "F0 F1 B1 B0", "rank 0: B 0.0 comes after B 0.1, and gradients would be summed in another order"),
        (0, "F0 F1 F2 B0 B1", "rank 0: F 0.2 is there 1 times"),
        (0, "F0 F1 X0 B1", "rank 0: B 0.1 is there 1 times"),
        (0, "F0 B0 F1 B1 R:0", "rank 1: it reduces the chunks []"),
        (0, "F0 B0 F1 B1 T:0", "rank 1: it has 0 ops T, and the ranks that hold a shared table, 0 and 1, have one each"),
        (1, "B0 F0 B1 F1", "deadlocks: "),
        (1, "F1 B0 F0 B1", "deadlocks: "),
    ],
)
def test_a_wrong_program_is_refused(rank: int, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check(changed(build("1f1b", 2, 2), rank, text))
    assert problem in str(raised.value) and str(raised.value).startswith("schedule 1f1b (p=2, m=2, v=1)")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("F0 B0 R:0 F1 B1 T:0", "R 0 comes before B 0.1"),
        ("F0 B0 F1 T:0 B1 R:0", "T 0 comes before B 0.1"),
        ("F0 B0 F1 B1 R:0 T:0", "R 0 comes before T 0"),
        ("F0 B0 F1 B1 T:0 T:0 R:0", "it has 2 ops T"),
        ("F0 B0 F1 B1 T:0 R:0 R:0", "it reduces the chunks [0, 0]"),
        ("F0 X0 F1 X1 W0 T:0 W1 R:0", "T 0 comes before W 0.1"),
    ],
)
def test_sums_in_the_wrong_place_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("[", r"\[")):
        check(changed(build("1f1b", 2, 2, replicas=True, tied=True), 1, text))


def test_split_backwards_are_taken_and_kept_in_order() -> None:
    """X sends the gradient, W follows it."""
    whole = build("1f1b", 2, 2, replicas=True, tied=True)
    split = replace(whole, programs=(ops("F0 F1 X0 W0 X1 W1 T:0 R:0"), ops("F0 X0 F1 X1 W0 W1 T:0 R:0")))
    check(split)
    for text, problem in (
        ("F0 F1 W0 X0 X1 W1 T:0 R:0", r"W 0\.0 comes before X 0\.0"),
        ("F0 F1 X0 X1 W1 W0 T:0 R:0", r"W 0\.0 comes after W 0\.1"),
        ("F0 F1 X1 X0 W0 W1 T:0 R:0", r"X 0\.0 comes after X 0\.1"),
        ("F0 F1 X0 X1 W0 T:0 R:0", r"W 0\.1 is there 0 times"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check(changed(split, 0, text))
    with pytest.raises(ConfigError, match=r"R 0 comes before W 0\.1"):
        check(changed(build("zb-h1", 2, 2, replicas=True), 0, "F0 F1 X0 W0 X1 R:0 W1"))


def test_a_cycle_is_told_op_by_op() -> None:
    check(changed(build("1f1b", 2, 2), 0, "F0 B0 F1 B1"))  # legal: it only waits
    with pytest.raises(ConfigError, match=r"deadlocks: .*F 0\.0 of rank 1 ← B 0\.0 of rank 1"):
        check(changed(build("1f1b", 2, 2), 1, "B0 F0 F1 B1"))


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        (
            "ifib",
            (2, 2, 1),
            "did you mean '1f1b'? Schedules: gpipe, 1f1b, interleaved, zb-h1, zb-v.",
        ),
        ("quick", (2, 2, 1), "there is no schedule 'quick'. Schedules: gpipe, 1f1b, interleaved, zb-h1, zb-v."),
        ("interleaved", (4, 6, 2), "6 is no multiple of 4. Numbers of micro-batches that fit: 4, 8. Schedule 1f1b takes any."),
        ("interleaved", (4, 3, 2), "3 is no multiple of 4. Numbers of micro-batches that fit: 4. Schedule 1f1b takes any."),
        ("interleaved", (4, 4, 1), "needs at least 2 chunks a rank, not 1. Use chunks 2, or schedule 1f1b."),
        ("gpipe", (4, 4, 2), "schedule gpipe has one chunk a rank, not 2. Use chunks 1, or schedule interleaved."),
        ("interleaved", (1, 4, 2), "a pipeline of one rank has one chunk, not 2. Use chunks 1, or at least 2 pipeline ranks."),
        ("zb-h1", (4, 4, 2), "schedule zb-h1 has one chunk a rank, not 2. Use chunks 1, or schedule interleaved."),
        ("zb-v", (4, 4, 1), "schedule zb-v has 2 chunks a rank, not 1. Use chunks 2, or schedule zb-h1."),
        ("zb-v", (4, 3, 2), "3 are fewer than 4. Numbers of micro-batches that fit: 4 and more. Schedule zb-h1 takes any."),
        (
            "zb-w",
            (4, 4, 2),
            "there is no schedule 'zb-w'; did you mean 'zb-v'? Schedules: gpipe, 1f1b, interleaved, zb-h1, zb-v.",
        ),
        ("1f1b", (2, 0, 1), "a pipeline needs a positive number of micro-batches, not 0."),
    ],
)
def test_sizes_that_do_not_fit_are_told_with_those_that_do(name: str, sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build(name, *sizes)
    assert str(raised.value).endswith(message) and "\n" not in str(raised.value)


def test_every_schedule_takes_what_its_errors_name() -> None:
    assert set(SCHEDULES) == {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"}
    for m in (4, 8):
        build("interleaved", 4, m, 2)
        build("zb-v", 4, m, 2)
    for m in (1, 3):
        build("zb-h1", 4, m)


@pytest.mark.parametrize("layers", range(1, 24))
def test_layers_are_split_as_everything_else_is(layers: int) -> None:
    for p, v in ((1, 1), (2, 1), (3, 1), (2, 2), (4, 2)):
        if layers >= p * v:
            assert list(split_layers(layers, p, v)) == split_sizes(layers, p * v)


def test_given_numbers_of_layers_are_taken_or_refused() -> None:
    assert split_layers(7, 3, counts=[2, 5, 0]) == (2, 5, 0) and split_layers(5, 2, counts=[0, 5]) == (0, 5)
    for counts, problem in (
        ([3, 3], "2 pipeline ranks × 1 chunks need 2 numbers of layers that sum to 7; 2 that sum to 6 were given. "),
        ([7], "1 that sum to 7 were given. The balanced split is 4,3."),
        ([8, -1], "only the first and the last stage may have no layers; the numbers given are [8, -1]."),
    ):
        with pytest.raises(ConfigError) as raised:
            split_layers(7, 2, counts=counts)
        assert problem in str(raised.value)
    with pytest.raises(ConfigError, match="only the first and the last stage"):
        split_layers(7, 3, counts=[4, 0, 3])
    with pytest.raises(
        ConfigError, match=r"5 layers cannot fill the 8 stages .* What fits: 4 ranks × 1 · 3 ranks × 1 · 2 ranks × 2\."
    ):
        split_layers(5, 4, 2)
