"""`summa3d plan schedule`: the drawing is the simulation's, its numbers are the closed forms', and errors say what fits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pages
import pytest

from summa3d.cli import main as entry
from summa3d.errors import ConfigError
from summa3d.parallel.draw import as_text, colour
from summa3d.parallel.schedule import ScheduleOp, build
from summa3d.parallel.simulate import timeline

PAPER = ["--pp", "4", "--micro-batches", "8", "--schedule", "interleaved", "--chunks", "2"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert entry.main(["plan", "schedule", *words]) == 0
    return capsys.readouterr().out


def test_a_drawing_has_a_row_for_each_rank_and_a_box_for_each_op(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--pp", "2", "--micro-batches", "3").splitlines()
    assert lines[:5] == [
        "1f1b, 2 ranks, 3 micro-batches; forward 1, backward 2",
        "",
        "        0         5         10",
        "rank 0  0a1a · ·0A──2a1A── ·2A──",
        "rank 1   ·0a0A──1a1A──2a2A── · ·",
    ]
    assert "time 12 = 9 of work + bubble 3 (33.3% of the work)" in lines
    assert lines[-3].split() == ["0", "0", "3", "2", "3", "3"] and lines[-2].split() == ["1", "1", "3", "1", "3", "3"]
    assert lines[-1].startswith("6 messages in all.")


def test_a_drawing_shows_all_chunks_and_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *PAPER)
    assert "time 28.5 = 24 of work + bubble 4.5 (18.8% of the work)" in text
    rows = [line for line in text.splitlines() if line.startswith("rank ") and "stages" not in line]
    assert all(row.count(f"{micro}{letter}") == 1 for row in rows for micro in range(8) for letter in "abAB")
    found = json.loads(printed(capsys, *PAPER, "--json"))
    assert (found["time"], found["work"], found["bubble"], found["messages"]) == (28.5, 24, 4.5, 112)
    assert [rank["in_flight"] for rank in found["ranks"]] == [11, 9, 7, 5]
    assert [rank["received"] for rank in found["ranks"]] == [24, 32, 32, 24]
    assert len(found["ops"]) == 4 * 32 and max(op["end"] for op in found["ops"]) == 28.5
    page = (pages.ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    _, listed = page.split("`summa3d plan schedule --json` prints: ")
    keys = {*found, *found["ranks"][0], *found["ops"][0]}
    assert keys <= set(re.findall(r"\w+", listed.split("\n\n")[0]))
    assert {(op["kind"], op["chunk"]) for op in found["ops"]} == {("F", 0), ("F", 1), ("B", 0), ("B", 1)}


def test_a_split_backward_has_a_box_for_each_half(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pp", "4", "--micro-batches", "8", "--schedule", "zb-v", "--chunks", "2"]
    text = printed(capsys, *words)
    assert text.startswith("zb-v, 4 ranks × 2 chunks, 8 micro-batches; forward 1, backward 2 (weights 1)\n")
    assert "time 25.5 = 24 of work + bubble 1.5 (6.2% of the work)" in text
    rows = [line for line in text.splitlines() if line.startswith("rank ") and "stages" not in line]
    assert all(row.count(f"{micro}{letter}") == 1 for row in rows for micro in range(8) for letter in "abABwx")
    assert "0w those of its weights (chunk b: 0x)" in text
    found = json.loads(printed(capsys, *words, "--weights", "0.5", "--json"))
    lengths = {(op["kind"], op["end"] - op["start"]) for op in found["ops"]}
    assert lengths == {("F", 0.5), ("X", 0.75), ("W", 0.25)}
    assert [rank["stages"] for rank in found["ranks"]] == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_a_narrow_terminal_gets_bands_that_are_the_whole_timeline() -> None:
    drawn = timeline(build("interleaved", 2, 4, 2))
    (whole, first, second), bands = [list(map(str, as_text(drawn)))[:3], list(map(str, as_text(drawn, 40)))]
    assert max(map(len, bands)) <= 40 and len(bands) > 6 and whole.split()[0] == "0"
    for rank, row in enumerate((first, second)):
        assert "".join(line[8:] for line in bands if line.startswith(f"rank {rank}")) == row[8:]


@pytest.mark.parametrize("times", [(1.37, 2.113), (1e-3, 5.0), (1 / 3, 2 / 3)])
def test_any_times_are_drawn_in_order(times: tuple[float, float]) -> None:
    drawn = timeline(build("1f1b", 3, 4), {"F": times[0], "B": times[1]})
    for rank, line in enumerate(list(map(str, as_text(drawn)))[1:]):
        places = [line.index(f"{op.micro}{'a' if op.kind == 'F' else 'A'}") for op in drawn.schedule.ops_of(rank)]
        assert places == sorted(places)


def test_chunks_and_kinds_have_colours_of_their_own() -> None:
    colours = {colour(ScheduleOp(kind, chunk, 0), 4) for kind in "FB" for chunk in range(4)}
    assert len(colours) == 8 and colour(ScheduleOp("F", 0, 0), 4)[1] is False and colour(ScheduleOp("F", 3, 0), 4)[1] is True


def test_a_figure_is_written_in_the_format_of_its_ending(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    printed(capsys, *PAPER, "--png", str(tmp_path / "schedule.png"))
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
    printed(capsys, *PAPER, "--json", "--png", str(tmp_path / "schedule.svg"))
    svg = (tmp_path / "schedule.svg").read_text()
    boxes = {
        colour(ScheduleOp(kind, chunk, 0), 2)[0]: svg.count(f"fill: {colour(ScheduleOp(kind, chunk, 0), 2)[0]}")
        for kind in "FB"
        for chunk in (0, 1)
    }
    assert set(boxes.values()) == {4 * 8}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pp", "4", "--micro-batches", "8", "--schedule", "interleavd", "--chunks", "2"], "did you mean 'interleaved'?"),
        (["--pp", "4", "--micro-batches", "6", "--schedule", "interleaved", "--chunks", "2"], "that fit: 4, 8."),
        (["--pp", "4", "--micro-batches", "8", "--layers", "3"], "What fits: 3 ranks × 1"),
        (["--pp", "2", "--micro-batches", "8", "--layers", "3,2,1"], "need 2 numbers of layers"),
        (["--pp", "2", "--micro-batches", "8", "--backward", "0"], "they must be positive"),
        (["--pp", "2", "--micro-batches", "8", "--forward", "nan"], "they must be positive, from 1e-06 to 1e+06."),
        (["--pp", "2", "--micro-batches", "8", "--backward", "1e308"], "--backward 1e+308 are times of an op"),
        (["--pp", "2", "--micro-batches", "8", "--forward", "0.001", "--backward", "1e6"], "at most 1048576 are drawn; --json"),
        (["--pp", "50000", "--micro-batches", "1"], "plan schedule draws at most 2048 ranks; --pp is 50000."),
        (["--pp", "1000", "--micro-batches", "1", "--png", "a.png"], "--png draws at most 512 ranks; --pp is 1000."),
        (["--pp", "2", "--micro-batches", "8", "--weights", "2"], "part of --backward 2: it must be positive and smaller."),
        (["--pp", "4", "--micro-batches", "3", "--schedule", "zb-v", "--chunks", "2"], "that fit: 4 and more."),
        (["--pp", str(2**62), "--micro-batches", "8"], "ops; at most 262144 are drawn."),
        (["--pp", "2", "--micro-batches", "8", "--png", "schedule.bmp"], "end it in one of .png, .svg, .pdf."),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["plan", "schedule", *words]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_a_stage_without_layers_takes_no_time() -> None:
    drawn = timeline(build("1f1b", 2, 2), layers=(4, 0))
    assert drawn.time == 12 and "0a" not in list(map(str, as_text(drawn)))[2]
    with pytest.raises(ConfigError, match="only the first and the last stage"):
        entry._run("plan", ["schedule", "--pp", "3", "--micro-batches", "2", "--layers", "2,0,2"])


@pytest.mark.parametrize("option", [["--tokens", "nan"], ["--tflops", "inf"], ["--tokens", "1e308"], ["--layers", "0"]])
def test_formulas_take_numbers_alone(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--layers", "2", "--hidden", "64", "--tokens", "1e9", "--ranks", "8", "--tflops", "100", *option, "--json"]
    assert entry.main(["plan", "formulas", *words]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and f"{option[0]} is {float(option[1]):g}" in captured.err


def test_more_layers_than_models_have_are_no_layers_of_a_drawing(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("9" * 40, "1,", "2,x"):
        with pytest.raises(SystemExit):
            entry.main(["plan", "schedule", "--pp", "2", "--micro-batches", "8", "--layers", wrong])
        assert f"{wrong!r} is no number of layers up to 4096" in capsys.readouterr().err
