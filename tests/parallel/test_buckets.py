"""Buckets of gradients: what is in one, who owns which part, and the sums and words of a reduction by buckets."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from memory_cases import FAMILIES, inputs
from scheme_table import GPT2

from summa3d.comm.grid import Place
from summa3d.comm.transport.progress import RequestsInFlight
from summa3d.comm.transport.select import NodeRule
from summa3d.errors import AgreementError, ConfigError
from summa3d.layout import Layout
from summa3d.nn import ModelConfig, build, initialise, scheme
from summa3d.nn.parameter import new_parameter
from summa3d.parallel.buckets import buckets_of
from summa3d.parallel.pipeline import chunks_of, stages_of
from summa3d.parallel.replicas import Replicas
from summa3d.parallel.states import states_of

SHAPES = {"first": (11, 4), "second": (8, 6), "vector": (5,), "last": (7, 8)}
"""Odd rows, fewer than replicas, and 8, whose nested split over 3 · 2 replicas is not the balanced one over 6."""


def states_on(grid, zero=0):
    """The states of four parameters, split by z along one dim; one of a stage, and one as an expert's."""
    module = torch.nn.Module()
    on_grid = scheme("cuboid", grid)
    for index, (name, shape) in enumerate(SHAPES.items()):
        layout = Layout(*([()] * (len(shape) - 1)), ("z",)) if index % 2 else Layout(("z",), *[()] * (len(shape) - 1))
        stage = on_grid.on(pp=(1,)) if name == "vector" else on_grid.on(ep=(0,)) if name == "last" else on_grid
        setattr(module, name, new_parameter(stage, layout, shape, ("constant", 0.0), torch.float64, True))
    return states_of(module, grid, zero)


def chunk_of(name: str) -> int:
    return int(name in ("vector", "last"))


@pytest.mark.parametrize(("rank", "ends"), [(0, 0), (1, 1)])
def test_what_is_before_the_layers_is_complete_with_the_first_stage_and_what_is_behind_them_with_the_last(rank, ends):
    """Of stages that go round, which have the layers of their number: 0 and 2 on rank 0, 1 and 3 on rank 1."""
    on_grid = replace(scheme("serial", Place({"pp": 2}, rank)), stages=stages_of("interleaved", 2, 2, 4))
    model = build(replace(GPT2, layers=4), on_grid)
    chunk, held = chunks_of(model), [name for name, parameter in model.named_parameters() if parameter.numel()]
    assert {chunk(name) for name in held if not name.startswith("blocks")} == {ends}
    assert {name.split(".")[1]: chunk(name) for name in held if name.startswith("blocks")} == {str(rank): 0, str(rank + 2): 1}


@pytest.mark.parametrize("size", [1, 200, 1 << 20])
@pytest.mark.parametrize("rank", [0, 2, 7, 23])
def test_every_element_has_one_owner_by_the_nested_split(size, rank):
    grid = Place({"z": 2, "dp": 3, "ep": 2, "pp": 2}, rank)
    states = {state.name: state for state in states_on(grid)}
    buckets = buckets_of(list(states.values()), chunk_of, size)
    held = [name for name in reversed(SHAPES) if states[name].parameter.numel()]
    assert sorted(name for bucket in buckets for name in bucket.names) == sorted(held)
    for bucket in buckets:
        assert bucket.axes == (("dp",) if "last" in bucket.names else ("dp", "ep"))
        assert {chunk_of(name) for name in bucket.names} == {bucket.chunk} and len(bucket.members) == prod(
            grid.shape[axis] for axis in bucket.axes
        )
        mine = grid[bucket.axes].index
        for position, name in enumerate(bucket.names):
            parts = [member[position] for member in bucket.members]
            block = states[name].parameter
            assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])] and parts[-1].stop == len(block)
            assert sum(part.words for part in parts) == block.numel()
            shard = states[name].shardings.used.sharded_over(bucket.axes).local_shape(grid)
            assert (parts[mine].stop - parts[mine].start, parts[mine].words) == (shard[0], prod(shard))
        assert bucket.sizes == [sum(part.words for part in member) for member in bucket.members]


def test_buckets_are_filled_from_the_last_parameter_to_the_first():
    grid = Place({"z": 2, "dp": 3, "ep": 1, "pp": 2}, rank=11)
    states = states_on(grid)
    one_chunk = [bucket.names for bucket in buckets_of(states, lambda name: 0, 1 << 20)]
    assert one_chunk == [("last", "vector", "second", "first")]
    assert [bucket.names for bucket in buckets_of(states, lambda name: 0, 1)] == [("last",), ("vector",), ("second",), ("first",)]
    assert [(bucket.chunk, bucket.names) for bucket in buckets_of(states, chunk_of, 1 << 20)] == [
        (1, ("last", "vector")),
        (0, ("second", "first")),
    ]
    reached = {state.name: state.parameter.nbytes for state in states}
    size = reached["last"] + 1
    assert next(bucket.names for bucket in buckets_of(states, lambda name: 0, size)) == ("last", "vector")
    assert buckets_of(states_on(Place({"z": 2, "pp": 2}, 3)), chunk_of, 1) == []
    with pytest.raises(ConfigError, match="A bucket of 0 bytes holds no gradient"):
        buckets_of(states, chunk_of, 0)


@pytest.mark.mpi(sizes=(12,))
def test_a_reduction_by_buckets_of_any_size_is_the_sum_over_the_replicas_in_its_words(make_grid):
    grid = make_grid(z=2, dp=3, ep=1, pp=2)
    states = states_on(grid)
    generator = torch.Generator().manual_seed(100 * grid.coordinates["dp"])
    gradients = {state.name: torch.randn(state.parameter.shape, dtype=torch.float64, generator=generator) for state in states}
    want = {name: sum(grid["dp"].all_gather(gradient[None]).unbind(0)) for name, gradient in gradients.items()}
    for size in (1, 100, 1 << 20):
        found = {name: torch.full_like(gradient, torch.nan) for name, gradient in gradients.items()}
        words = 0
        with grid.ledger.watch() as moved:
            for bucket in buckets_of(states, chunk_of, size):
                plane = grid[bucket.axes]
                own = plane.reduce_scatter(bucket.pack(gradients), sizes=bucket.sizes)
                for name, part in bucket.parts_in(own, plane.index, {name: one.shape for name, one in gradients.items()}).items():
                    (state,) = (state for state in states if state.name == name)
                    sharded = state.shardings.used.sharded_over(bucket.axes)
                    start = sharded.slices(grid)[0].start - state.shardings.used.slices(grid)[0].start
                    assert torch.equal(part, want[name][start : start + len(part)]) and part.shape == sharded.local_shape(grid)
                bucket.unpack(plane.all_gather(own, sizes=bucket.sizes), found)
                mine = bucket.sizes[plane.index]
                words += (plane.size - 1) * mine + sum(bucket.sizes) - mine
        assert all(torch.equal(found[name], want[name]) for name in want)
        assert moved.words == words


@pytest.mark.mpi(sizes=(2,))
def test_replicas_whose_buckets_differ_are_told_which(make_grid):
    grid = make_grid(dp=2)
    module = torch.nn.Module()
    module.only = new_parameter(scheme("serial", grid), Layout((), ()), (4, 3), ("constant", 0.0), torch.float64, True)
    states = states_of(module, grid)
    Replicas.of(states, grid, 1, 1).check()
    chunk = grid.coordinates["dp"]
    with pytest.raises(AgreementError, match=r"on the buckets of dp:\n  bucket 0: \(0, .*rank 0; \(1, .*rank 1$"):
        Replicas.of(states, grid, 1, 1, lambda name: chunk).check()


@pytest.mark.mpi(sizes=(12,))
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_gradient_that_there_is_not_is_0(make_grid, zero):
    """Of a parameter that no loss depends on, on all replicas alike."""
    grid = make_grid(z=2, dp=3, ep=1, pp=2)
    replicas = Replicas.of(states_on(grid, zero), grid, zero, 1 << 20, chunk_of)
    for state in replicas.states.values():
        if state.name != "second" and state.shardings.numel:
            ones = torch.ones(state.shardings.shape, dtype=torch.float64)
            state.add(ones) if zero < 2 else state.taken(state, ones)
    replicas.reduce()
    for state in replicas.states.values():
        if state.shardings.numel:
            want = 0 if state.name == "second" else 3
            assert state.own_gradient.shape == state.shardings.partition.local_shape(grid)
            assert (state.own_gradient == want).all(), state.name


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("large", [False, True])
def test_a_bucket_is_packed_where_it_is_summed_unless_it_is_too_large_for_the_nodes_memory(make_grid, monkeypatch, large):
    grid, module = make_grid(dp=2, node_memory=True), torch.nn.Module()
    module.weight = new_parameter(scheme("cuboid", grid), Layout((), ()), (5, 3), ("constant", 0.0), torch.float64, True)
    (state,) = states = states_of(module, grid, 0)
    replicas, plane, packed = Replicas.of(states, grid, 0, 1 << 20), grid["dp"], []
    allocate, reduce_scatter = plane.allocate, plane.start_reduce_scatter
    monkeypatch.setattr(plane, "allocate", lambda *sizes: packed.append(allocate(*sizes)) or packed[-1])
    monkeypatch.setattr(plane, "start_reduce_scatter", lambda array, **how: packed.append(array) or reduce_scatter(array, **how))
    if large:
        monkeypatch.setattr(NodeRule, "LARGEST", 2 * 15 * 8 - 1)
    state.add(torch.full((5, 3), grid.coordinates["dp"] + 1.0, dtype=torch.float64))
    replicas.reduce()
    assert len(packed) == 2 - large and packed[0] is packed[-1] is not None
    assert state.own_gradient.numel() in (6, 9) and (state.own_gradient == 3).all()


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("zero", [0, 1])
def test_the_last_backward_starts_sums_in_the_order_of_buckets_and_the_rest_comes_behind_it(make_grid, monkeypatch, zero):
    """One replica alone has a gradient of `second`: what comes behind it waits on both, so that the order is the same."""
    grid, module = make_grid(dp=2), torch.nn.Module()
    for name, shape in SHAPES.items():
        on_grid = scheme("serial", grid)
        setattr(module, name, new_parameter(on_grid, Layout(*[()] * len(shape)), shape, ("constant", 1.0), torch.float64, True))
    initialise(module, on_grid, 1)
    replicas, started, index = Replicas.of(states_of(module, grid, zero), grid, zero, 1), [], grid.coordinates["dp"]
    start = replicas.start
    monkeypatch.setattr(replicas, "start", lambda bucket: started.append(bucket.names[0]) or start(bucket))

    def backward(summands):
        sum((1 + index) * getattr(module, name).square().sum() for name in summands).backward()

    backward(SHAPES)
    assert started == []  # another micro-batch comes
    replicas.expect(0)
    with grid.ledger.watch() as moved:
        backward(["first", "vector", "last"] + ["second"] * index)
    in_backward = ["last", "vector"] + ["second", "first"] * index
    assert started == in_backward
    assert moved.words == grid.ledger.total(phase="optimizer").words > 0
    replicas.start_chunk(0)
    replicas.finish()
    assert started == ["last", "vector", "second", "first"]
    for name, state in replicas.states.items():
        assert (state.own_gradient == (2 * (1 + 2) * 2 if name != "second" else 2 * (1 + 2) + 2 * 2)).all(), name


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_buckets_begin_in_backward_as_their_gradients_come_while_mpi_moves_those_in_flight(make_grid, monkeypatch, family, zero):
    """Learned positions, too, are completed at the end: a first bucket with them would keep all others waiting."""
    grid = make_grid(dp=2, node_memory=False)
    model = build(ModelConfig(**{**FAMILIES[family], "layers": 5}), scheme("oned", grid))
    arrived, left, moves, moved = set(), [], [], []
    start, advance = Replicas.start, RequestsInFlight.advance
    monkeypatch.setattr(Replicas, "start", lambda self, bucket: left.append(arrived - set(bucket.names)) or start(self, bucket))
    monkeypatch.setattr(RequestsInFlight, "advance", lambda self: moves.append(self) or advance(self))
    for name, taking in {"_arrived": lambda name, leaf: name, "take": lambda bucket, state, gradient: state.name}.items():
        act = getattr(Replicas, name)

        def noted(self, *arguments, act=act, taking=taking):
            arrived.add(taking(*arguments))
            moves.clear()
            act(self, *arguments)
            moved.append(len(moves))

        monkeypatch.setattr(Replicas, name, noted)
    replicas = Replicas.of(states_of(model, grid, zero), grid, zero, 4 * 96 * 96)
    replicas.expect(0)
    model(**inputs(model.config), count=7, **({"pairs": 5} if family == "bert" else {})).backward()
    replicas.start_chunk(0)
    replicas.finish()
    before = set()
    for waiting, bucket in zip(left, replicas.buckets, strict=True):
        assert len(waiting - before) <= 12, f"{bucket.names} began {len(waiting - before)} gradients after the bucket before"
        before |= {*bucket.names}
    assert len(replicas.buckets) > 8 and len(moved) == len(arrived)
    assert 0 not in moved
