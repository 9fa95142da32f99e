"""Timelines of pipeline schedules as text and as a figure: a row for each rank, a box for each op, its micro-batch inside."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import gcd, lcm
from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, Any

from ..figures import BOTH_COLUMNS, CAPTION
from .schedule import ScheduleOp
from .simulate import ScheduleTimeline

if TYPE_CHECKING:
    from rich.text import Text

HUES = {"F": (0x1F, 0x4E, 0x9C), "B": (0x1B, 0x7A, 0x3D), "X": (0x1B, 0x7A, 0x3D), "W": (0xA6, 0x4B, 0x00)}
"""Kinds of ops in the first chunk; later chunks are lighter."""
LETTERS = {"F": ascii_lowercase, "B": ascii_uppercase, "X": ascii_uppercase, "W": "wxyz"}
"""Kinds of ops in text: the letter of each chunk."""
LIGHTEST = 0.65
"""How far the last chunk's colour lies between its hue and white."""
IDLE = "#bdbdbd"
SHORTEST = 1 / 2
"""A column of text is at least this part of the shortest op, whatever the times are."""
DENOMINATOR = 1000
"""Times are compared as fractions of at most this denominator."""
TICKS = 8
"""Columns of text from one time of the ruler to the next, at least."""
ROW, FRAME = 0.24, 0.62
"""Inches of a rank's row in a figure, and of what is above and below."""
LETTER = 0.055
"""Inches of a digit in a figure: a box that is narrower than its number has none."""


def colour(op: ScheduleOp, chunks: int) -> tuple[str, bool]:
    """The colour of an op's box, and whether it is light."""
    light = LIGHTEST * op.chunk / max(chunks - 1, 1)
    red, green, blue = (round(part + (0xFF - part) * light) for part in HUES[op.kind])
    return f"#{red:02x}{green:02x}{blue:02x}", light > LIGHTEST / 2


def as_text(drawn: ScheduleTimeline, width: int | None = None) -> Iterator[Text]:
    """Lines of a timeline, in bands of at most `width` columns: a ruler, then a row for each rank.

    A micro-batch's number is followed by the letter of its op and chunk (`LETTERS`).
    """
    from rich.text import Text

    schedule, step = drawn.schedule, column(drawn)
    box = len(str(schedule.m - 1)) + 1
    label = len(f"rank {schedule.p - 1}") + 2
    columns = max(1, round(drawn.time / step))
    most = columns if width is None else max(1, (width - label) // box)
    for first in range(0, columns, most):
        last = min(first + most, columns)
        yield Text(" " * label + ruler(step, first, last, box))
        for rank in range(schedule.p):
            line = Text(f"rank {rank}".ljust(label))
            for text, style in cells(drawn, rank, step, box)[first:last]:
                line.append(text, style)
            yield line
        if last < columns:
            yield Text()


def column(drawn: ScheduleTimeline) -> float:
    """The time that a column of text stands for: the largest that divides all starts and ends, if it is not too short."""
    times = [Fraction(time).limit_denominator(DENOMINATOR) for span in drawn.spans for time in (span.start, span.end)]
    scale = lcm(*(time.denominator for time in times))
    shortest = min(span.end - span.start for span in drawn.spans if span.end > span.start)
    return max(gcd(*(int(time * scale) for time in times)) / scale, shortest * SHORTEST)


def cells(drawn: ScheduleTimeline, rank: int, step: float, box: int) -> list[tuple[str, str]]:
    """The row of a rank: text and style of each column."""
    row = [("·".rjust(box), "dim")] * max(1, round(drawn.time / step))
    for span in drawn.spans:
        first, last = round(span.start / step), round(span.end / step)
        if span.rank != rank or last == first:
            continue
        letters = LETTERS[span.op.kind]
        name = f"{span.op.micro}{letters[span.op.chunk % len(letters)]}"
        background, light = colour(span.op, drawn.schedule.v)
        style = f"{'black' if light else 'white'} on {background}"
        row[first] = name.rjust(box), style
        row[first + 1 : last] = [("─" * box, style)] * (last - first - 1)
    return row


def ruler(step: float, first: int, last: int, box: int) -> str:
    """The times at the beginning of some columns."""
    every = next(unit * 10**power for power in range(9) for unit in (1, 2, 5) if unit * 10**power * box >= TICKS * step)
    marks = " " * (last - first) * box
    for time in range(0, round(last * step) + 1, every):
        place = (round(time / step) - first) * box
        if 0 <= place <= len(marks) - len(str(time)):
            marks = marks[:place] + str(time) + marks[place + len(str(time)) :]
    return marks.rstrip()


def as_figure(figure: Any, drawn: ScheduleTimeline) -> None:
    """Draw a timeline into a matplotlib figure, as figures 3 and 4 of Narayanan et al. 2021 do."""
    schedule = drawn.schedule
    figure.set_size_inches(BOTH_COLUMNS, FRAME + ROW * schedule.p)
    axes = figure.subplots()
    for rank in range(schedule.p):
        axes.broken_barh([(0, drawn.time)], (rank - 0.5, 1), facecolor=IDLE)
    letter = LETTER * drawn.time / BOTH_COLUMNS
    for span in drawn.spans:
        if span.end > span.start:
            background, light = colour(span.op, schedule.v)
            axes.broken_barh([(span.start, span.end - span.start)], (span.rank - 0.5, 1), fc=background, ec="white", lw=0.4)
            if span.end - span.start > letter * len(str(span.op.micro)):
                middle = (span.start + span.end) / 2
                axes.text(middle, span.rank, span.op.micro, ha="center", va="center", fontsize=5.5, color="k" if light else "w")
    axes.set(xlim=(0, drawn.time), ylim=(schedule.p - 0.5, -0.5), xlabel="time", yticks=range(schedule.p))
    axes.set_yticklabels([f"rank {rank}" for rank in range(schedule.p)])
    axes.grid(visible=False)
    axes.tick_params(left=False)
    axes.set_title(f"{summary(drawn)[0]}: {summary(drawn)[1]}", loc="left")
    figure.supxlabel(legend(drawn), x=0.01, ha="left", **CAPTION)


def summary(drawn: ScheduleTimeline) -> tuple[str, str]:
    """Describe what a timeline shows, and its time."""
    schedule = drawn.schedule
    chunks = f" × {schedule.v} chunks" if schedule.v > 1 else ""
    work, wait = drawn.ideal, drawn.time - drawn.ideal
    share = f" ({wait / work:.1%} of the work)" if work else ""
    return (
        f"{schedule.name}, {_several(schedule.p, 'rank')}{chunks}, {_several(schedule.m, 'micro-batch')}",
        f"time {drawn.time:.6g} = {work:.6g} of work + bubble {wait:.6g}{share}",
    )


def _several(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "es" if what.endswith("ch") else "s")


def legend(drawn: ScheduleTimeline) -> str:
    """Draw the meaning of colours."""
    lighter = "; later chunks are lighter" if drawn.schedule.v > 1 else ""
    backward = "green: gradients of inputs, brown: of weights" if drawn.schedule.split else "green: backward"
    return f"Blue: forward, {backward}{lighter}; grey: idle. Micro-batches count from 0."
