"""Ways of storing that are not the default: vectors root-only on a row or a diagonal, and the 3-D product as first published."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from nn_oracle.volume import GPTVolume, product_cost
from nn_parity import global_weights, gradient_norm, whole
from pairs import turns
from scheme_table import FAMILIES, GPT2, check_against_plain_torch, rows_for, tokens_and_labels
from torch.nn import functional

from summa3d.autograd.recompute import places_of, weights_in
from summa3d.comm.grid import Place
from summa3d.errors import GridError, LayoutError, ShapeError
from summa3d.layout import Layout, collect, distribute
from summa3d.nn import GPT, MLP, initialise, scheme
from summa3d.nn.overlap import Overlap

STORED = {
    1: [("summa", "root-only", {"x": 1, "y": 1}), ("cuboid", "diagonal", {"x": 1})],
    2: [("summa", "root-only", {"x": 2}), ("summa", "root-only", {"y": 2}), ("cuboid", "diagonal", {"x": 2})],
    4: [("summa", "root-only", {"x": 2, "y": 2}), ("cuboid", "diagonal", {"y": 2, "z": 2})],
    6: [("summa-transposed", "root-only", {"x": 3, "y": 2})],
    8: [("cuboid", "diagonal", {"x": 2, "y": 2, "z": 2})],
    12: [("summa", "root-only", {"x": 3, "y": 4}), ("cuboid", "diagonal", {"x": 3, "y": 2, "z": 2})],
}


@pytest.mark.mpi(sizes=tuple(STORED))
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["turns", "all"])
def test_a_model_with_root_only_or_diagonal_vectors_equals_plain_torch(make_grid, world_size, every):
    cases = product(STORED[world_size], FAMILIES) if every or world_size == 4 else turns(STORED[world_size], tuple(FAMILIES))
    for (name, vectors, axes), family in cases:
        check_against_plain_torch(FAMILIES[family], scheme(name, make_grid(**axes), vectors=vectors))


@pytest.mark.mpi(sizes=tuple(STORED))
def test_hosted_and_diagonal_vectors_move_their_words_and_count_once_in_the_norm(make_grid, world_size):
    """Of twelve ranks the summa: the diagonal's words on eight, and the wide test has both."""
    check_words(make_grid, STORED[world_size][: 1 if world_size == 12 else None])


@pytest.mark.wide
@pytest.mark.mpi(sizes=(12,))
def test_so_they_do_on_every_grid_of_twelve_ranks(make_grid):
    check_words(make_grid, STORED[12])


def check_words(make_grid: Any, stored: list[tuple[str, str, dict[str, int]]]) -> None:
    for name, vectors, axes in stored:
        on_grid = scheme(name, grid := make_grid(**axes), vectors=vectors)
        model = GPT(GPT2, on_grid, torch.float64, seed=3).eval()
        tokens, labels = tokens_and_labels(GPT2, rows_for(on_grid), 12)
        with grid.ledger.watch() as forward:
            loss = model(tokens, labels)
        with grid.ledger.watch() as backward:
            loss.backward()
        cost = GPTVolume(GPT2, on_grid, *tokens.shape).step()
        assert (forward.words, forward.messages) == (cost.forward.words, cost.forward.messages), axes
        assert (backward.words, backward.messages) == (cost.backward.words, cost.backward.messages), axes
        gradients = [whole(model, parameter, p.grad) for parameter, p in model.named_parameters()]
        want = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
        assert abs(gradient_norm(model.parameters(), grid) - want) <= 1e-12 * want


@pytest.mark.mpi(sizes=(4,))
def test_hosted_and_diagonal_vectors_are_found_by_what_is_computed_again_and_as_copies_in_other_dtypes(make_grid, world_size):
    for name, vectors, axes in STORED[world_size]:
        model = GPT(GPT2, scheme(name, make_grid(**axes), vectors=vectors), torch.float64, seed=3).eval()
        tokens, labels = tokens_and_labels(GPT2, rows_for(model.context), 12)
        places, gradients = places_of([model]), []
        for kind, weights in (
            ("none", [module._parameters[name] for module, name in places]),
            ("full", [module._parameters[name].to(torch.float64, copy=True) for module, name in places]),
        ):
            model.recompute(kind)
            model.zero_grad(set_to_none=True)
            with weights_in(places, weights):
                model(tokens, labels).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True)), name


@pytest.mark.parametrize(
    ("name", "vectors", "axes"),
    [("summa", "root-only", {"x": 3, "y": 2}), ("cuboid", "diagonal", {"x": 2, "y": 3, "z": 3})],
)
def test_every_element_of_a_hosted_or_diagonal_vector_lies_on_one_rank(name, vectors, axes):
    held, n = torch.zeros(29), 29
    for rank in range(Place(axes).size):
        on_rank = scheme(name, Place(axes, rank), vectors=vectors)
        for layout in (on_rank.residual, on_rank.scheme.after_linear(on_rank.residual)):
            held[on_rank.scheme.vector(layout).slices((n,), on_rank.grid.shape, on_rank.grid.coordinates)] += 1
    assert (held == 2).all()


def test_vectors_are_refused_where_a_scheme_or_a_grid_cannot_store_them():
    with pytest.raises(LayoutError, match=r"'diagonal', .* not supported by the summa scheme"):
        scheme("summa", Place({"x": 2, "y": 2}), vectors="diagonal")
    with pytest.raises(LayoutError, match="Schemes that support 'root-only': summa, summa-transposed\\."):
        scheme("oned", Place({"y": 2}), vectors="root-only")
    with pytest.raises(GridError, match=r"y=2, z=1.\n  Grids that fit: .*x=1,y=2,z=2"):
        scheme("cuboid", Place({"x": 2, "y": 2}), vectors="diagonal")


@pytest.mark.mpi(sizes=(8,))
def test_the_mlp_runs_on_the_faces_of_the_cube_and_moves_its_words(make_grid):
    rows, h, f = 13, 11, 17
    agarwal = scheme("agarwal", grid := make_grid(x=2, y=2, z=2))
    mlp = MLP(h, f, agarwal, dtype=torch.float64)
    initialise(mlp, agarwal, seed=1)
    mlp.context = agarwal
    weights = {name: value.requires_grad_() for name, value in global_weights(mlp).items()}
    x, seed = torch.randn(2, rows, h, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    want_x = x.clone().requires_grad_()
    inner = functional.gelu(want_x @ weights["up.weight"] + weights["up.bias"], approximate="tanh")
    want = inner @ weights["down.weight"] + weights["down.bias"]
    want.backward(seed)
    block = distribute(x, grid, agarwal.residual).requires_grad_()
    with grid.ledger.watch() as forward:
        y = mlp(block, rows)
    y.backward(distribute(seed, grid, agarwal.residual))
    assert (collect(y.detach(), grid, agarwal.residual, x.shape) - want).norm() <= 1e-13 * want.norm()
    assert (collect(block.grad, grid, agarwal.residual, x.shape) - want_x.grad).norm() <= 1e-13 * want_x.grad.norm()
    for name, value in weights.items():
        assert (whole(mlp, name, mlp.get_parameter(name).grad) - value.grad).norm() <= 1e-12 * value.grad.norm(), name
    plans = (agarwal.scheme.plan(agarwal.residual, "nn", rows, f, h), agarwal.scheme.plan(mlp.up.output_layout, "nn", rows, h, f))
    cost = sum(product_cost(plan, grid.shape, grid.coordinates).forward.words for plan in plans)
    assert forward.words == cost
    assert mlp.down.output_layout == agarwal.residual
    assert sum(grid.comm.allgather(mlp.up.weight.numel() > 0)) == 4  # the other half of the cube holds none of it


@pytest.mark.mpi(sizes=(8,))
def test_a_model_on_the_faces_of_the_cube_is_refused(make_grid):
    agarwal = scheme("agarwal", make_grid(x=2, y=2, z=2))
    with pytest.raises(LayoutError, match=r"nn\.MLP, not whole models"):
        GPT(GPT2, agarwal)
    with pytest.raises(ShapeError, match="global number of rows"):
        MLP(8, 8, agarwal)(torch.zeros(2, 4))


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("name", ["cuboid", "summa"])
def test_parameters_are_held_by_the_ranks_of_their_stages_alone(make_grid, name):
    """Three layers: of stage 0, of stage 1, and of both, as a tied table is."""
    job = make_grid(y=2, pp=2)
    here, inner = job.coordinates["pp"], scheme(name, job)
    layers, serial = torch.nn.ModuleList(), torch.nn.ModuleList()
    for holders in ((0,), (1,), (0, 1)):
        layers.append(MLP(24, 29, inner.on(pp=holders), std=1.0, dtype=torch.float64))
        serial.append(MLP(24, 29, scheme("serial"), std=1.0, dtype=torch.float64))
    initialise(layers, inner, 5)
    initialise(serial, scheme("serial"), 5)
    whole = torch.randn(4, 3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x = distribute(whole, inner.grid, inner.residual)
    for index, (layer, alone) in enumerate(zip(layers, serial, strict=True)):
        for parameter, want in zip(layer.parameters(), alone.parameters(), strict=True):
            sharding = parameter.sharding
            assert (parameter.numel() > 0) == (index in (here, 2)) and sharding.layout.root_only == ("pp",)
            assert torch.equal(collect(parameter.data, job, sharding.layout, sharding.shape), want.data)
        alone(whole).square().sum().backward()
        if index in (here, 2):
            y = layer(x)
            torch.testing.assert_close(y, distribute(alone(whole).detach(), inner.grid, inner.residual), rtol=1e-12, atol=0)
            y.square().sum().backward()
    want = torch.stack([p.grad.square().sum() for p in serial.parameters()]).sum().sqrt().item()
    assert gradient_norm(layers.parameters(), job) == pytest.approx(want, rel=1e-12)


def test_schemes_of_stages_share_prefetch_and_workspace_and_copies_of_a_model_have_their_own():
    place = Place({"x": 2, "pp": 3})
    whole = scheme("cuboid", place, overlap=Overlap(gather=1))
    stages = [whole.on(pp=(index,)) for index in range(3)]
    shared = ("state", "prefetcher", "workspace")
    assert all(getattr(stage, name) is getattr(whole, name) for stage in stages for name in shared)
    copied = copy.deepcopy(stages)
    for name in shared:
        assert len({id(getattr(stage, name)) for stage in copied}) == 1 and getattr(copied[0], name) is not getattr(whole, name)
    assert copied[0].prefetcher.state is copied[0].state
    assert whole.on(pp=(0, 2)).at == (("pp", (0, 2)),) and whole.on(dp=(0,)) == whole.on() == whole
    for at, named in (
        ({"pp": (3,)}, "pp=\\(3,\\): axis pp has the indices 0 to 2"),
        ({"x": (1,)}, "x=\\(1,\\)"),
        ({"cp": (1,)}, "cp"),
    ):
        with pytest.raises(LayoutError, match=f"Parameters cannot be held at {named}"):
            whole.on(**at)


def test_shards_over_several_axes_have_the_sizes_that_their_layout_gives_them():
    shape, layout = {"dp": 2, "ep": 2}, Layout("h").sharded_over(("dp", "ep"))
    sharded = replace(scheme("serial", Place(shape)), sharded=("dp", "ep"))
    want = [layout.local_shape((6,), shape, at)[0] for at, _ in layout.blocks((6,), shape)]
    assert sharded._shard_sizes(Layout("h"), (6,)) == want == [2, 1, 2, 1]  # not 2, 2, 1, 1
    uneven = replace(scheme("serial", Place({"dp": 2, "ep": 3})), sharded=("dp", "ep"))
    assert uneven._shard_sizes(Layout("h"), (8,)) == [2, 1, 1, 2, 1, 1]  # dp first: not 2, 1, 2, 1, 1, 1
