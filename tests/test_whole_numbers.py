"""A text that is no number of 64 bits, or names something twice, is refused wherever it is read, by an error of ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from summa3d.cli.bench import parse_entry
from summa3d.cli.bench.block import _is_meant
from summa3d.errors import Summa3dError
from summa3d.launcher.emulate import network_of
from summa3d.layout.notation import read
from summa3d.plan.search.request import _limited
from summa3d.sweep.points import axes_of
from summa3d.train.config import DataConfig, PipelineConfig
from summa3d.train.data.corpus import NumberTokenizer

READERS: dict[str, Callable[[str], object]] = {
    "layers of stages": lambda text: PipelineConfig(layers=f"4,{text}"),
    "tokenizer": lambda text: DataConfig(tokenizer=f"numbers:{text}"),
    "tokens": lambda text: NumberTokenizer(50).encode(f"3 {text}".encode()),
    "limit": lambda text: _limited([f"y<={text}"]),
    "grid of a sweep": lambda text: axes_of(f"x={text}"),
    "entry of a benchmark": lambda text: parse_entry(f"cuboid:x={text}", None, 2),
    "block of a layout": lambda text: read(f"m:x[{text}] k"),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_digits_that_are_no_number_are_refused(reader: Callable[[str], object]) -> None:
    reader("2")
    for text in ("²", "9" * 5000, "-1", "1.0"):
        with pytest.raises(Summa3dError):
            reader(text)


TWICE: dict[str, Callable[[], object]] = {
    "grid of a sweep": lambda: axes_of("x=2, x=3"),
    "entry of a benchmark": lambda: parse_entry("cuboid:y=2,x=2,y=1", None, 2),
    "option of an entry": lambda: parse_entry("summa:panel=8,panel=9", None, 2),
    "emulated nodes": lambda: network_of("nodes=2,port=1gbit,nodes=4"),
}


@pytest.mark.parametrize("reader", TWICE.values(), ids=TWICE)
def test_a_name_that_is_given_twice_is_refused(reader: Callable[[], object]) -> None:
    with pytest.raises(Summa3dError):
        reader()


def test_a_grid_of_the_blocks_benchmark_names_each_axis_once() -> None:
    shape = {"x": 1, "y": 2, "z": 1}
    meant = ["", "y=2", "x=1, y=2", "1,2,1"]
    assert [text for text in [*meant, "x=2", "y=2,y=2", "x=1,y=1,y=2", "2,1,1", "y"] if _is_meant(text, shape)] == meant


@pytest.mark.parametrize("size", [2.0, True, "2"])
def test_a_size_in_a_sweeps_table_is_a_whole_number(size: object) -> None:
    assert axes_of({"x": 2}) == {"x": 2} and axes_of({}) == {}  # of one rank
    with pytest.raises(Summa3dError, match="is no grid"):
        axes_of({"x": size})
