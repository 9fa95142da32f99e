"""The norm of all gradients and clipping by it are torch's on one rank, in every scheme; copies that differ are named."""

from __future__ import annotations

import copy
import io
from math import inf
from typing import Any

import pytest
import torch

from summa3d.autograd import sum_gradient
from summa3d.errors import AgreementError, ConfigError, GridError, Summa3dError
from summa3d.layout import distribute
from summa3d.nn import LayerNorm, Linear, check_copies, clip_grad_norm_, grad_norm, initialise, scheme
from summa3d.nn.copies import first_holders
from summa3d.nn.gradients import norms_and_votes

GRIDS: dict[int, list[tuple[str, str, dict[str, int]]]] = {
    1: [("cuboid", "copied", {"x": 1, "y": 1, "z": 1}), ("serial", "copied", {"x": 1})],
    2: [("oned", "copied", {"y": 2}), ("tesseract", "copied", {"d": 2})],
    3: [("oned-sp", "copied", {"y": 3}), ("summa", "copied", {"y": 3})],
    4: [("cuboid", "copied", {"x": 2, "y": 1, "z": 2}), ("summa", "root-only", {"x": 2, "y": 2}), ("oned", "copied", {"y": 4})],
    6: [("cuboid-sequence", "copied", {"x": 1, "y": 3, "z": 2}), ("summa-transposed", "copied", {"x": 3, "y": 2})],
    8: [("cuboid", "diagonal", {"x": 2, "y": 2, "z": 2}), ("tesseract", "copied", {"x": 2, "y": 2, "d": 2})],
}
ROWS, SEQUENCE, WIDTH, INNER = 12, 6, 10, 13


def plain_model() -> torch.nn.Module:
    """The whole model in torch's layers, its biases away from 0."""
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, INNER), torch.nn.Tanh(), torch.nn.Linear(INNER, WIDTH)
    ).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def own(ours: Any, theirs: torch.Tensor) -> torch.Tensor:
    """This rank's block of one of torch's tensors, whose linear layers have the transposes of ours."""
    whole = theirs.detach().T.contiguous() if theirs.dim() == 2 else theirs.detach()
    return distribute(whole, ours.grid, ours.sharding.layout)


def split_model(on_grid: Any, plain: torch.nn.Module) -> torch.nn.Module:
    """The model in layers on a grid, with the weights of a plain one."""
    norm = LayerNorm(WIDTH, on_grid, dtype=torch.float64)
    up = Linear(WIDTH, INNER, on_grid, dtype=torch.float64)
    down = Linear(INNER, WIDTH, on_grid, up.output_layout, dtype=torch.float64)
    model = torch.nn.Sequential(norm, up, torch.nn.Tanh(), down)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            ours.copy_(own(ours, theirs))
    return model


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, SEQUENCE, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def backward(model: torch.nn.Module, x: torch.Tensor, count: int = ROWS * SEQUENCE) -> None:
    model.zero_grad()
    ((model(x) - x).square().sum() / count).backward()


def block_of(x: torch.Tensor, on_grid: Any) -> torch.Tensor:
    return on_grid.as_stored(distribute(x, on_grid.grid, on_grid.residual))


def both(make_grid: Any, name: str, vectors: str, axes: dict[str, int], **options: Any) -> tuple[Any, Any, Any]:
    """The scheme, the model in its layers, and the plain one, both with gradients."""
    on_grid, plain = scheme(name, make_grid(**axes, **options), vectors=vectors), plain_model()
    model = split_model(on_grid, plain)
    backward(model, block_of(batch(), on_grid))
    backward(plain, batch())
    return on_grid, model, plain


@pytest.mark.mpi(sizes=tuple(GRIDS))
@pytest.mark.parametrize("norm_type", [2.0, 1.0, inf], ids=str)
@pytest.mark.turns
def test_the_norm_and_what_clipping_leaves_are_torchs_of_the_whole_model(comm, make_grid, world_size, norm_type):
    for case in GRIDS[world_size]:
        _, model, plain = both(make_grid, *case)
        each = [torch.linalg.vector_norm(p.grad, norm_type).item() for p in plain.parameters()]
        assert grad_norm(model, norm_type, each=True).tolist() == pytest.approx(each, rel=1e-12), case
        limit = 0.3 * torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type).item()
        want = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit, norm_type).item()
        norm = clip_grad_norm_(model.parameters(), limit, norm_type)
        assert norm.item() == pytest.approx(want, rel=1e-12), case
        assert comm.allgather(norm.item()) == [norm.item()] * comm.size
        assert grad_norm(model, norm_type).item() == pytest.approx(limit, rel=1e-4)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, own(ours, theirs.grad), rtol=1e-12, atol=1e-16)


@pytest.mark.mpi(sizes=tuple(GRIDS))
def test_ten_clipped_steps_of_adam_are_those_of_one_process_and_copies_stay_equal(make_grid, world_size):
    for case in GRIDS[world_size]:
        on_grid, model, plain = both(make_grid, *case)
        optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, plain)]
        for step in range(10):
            backward(model, block_of(batch(step), on_grid))
            backward(plain, batch(step))
            clip_grad_norm_(model, 0.5)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()
            check_copies(model)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.data, own(ours, theirs), rtol=1e-11, atol=1e-12)


@pytest.mark.mpi(sizes=(4,))
def test_torchs_own_clipping_of_blocks_lets_copies_drift_apart_and_check_copies_names_the_first(make_grid):
    """The reason for a function of our own."""
    _, model, _ = both(make_grid, "cuboid", "copied", {"x": 2, "y": 2, "z": 1})
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(AgreementError, match=r"check_copies: the copies of 0\.\w+ differ: hash \w+ on rank") as error:
        check_copies(model)
    assert "more of 6 parameters" in str(error.value) and "summa3d.nn.clip_grad_norm_" in str(error.value)


@pytest.mark.mpi(sizes=(3, 4))
def test_check_copies_says_which_ranks_hold_another_value(comm, make_grid, world_size):
    axes = {3: {"y": 3}, 4: {"y": 4}}[world_size]
    _, model, _ = both(make_grid, "oned", "copied", axes)
    check_copies(model)
    if comm.rank == 2:
        model[3].bias.data[5] = -model[3].bias.data[5]
    others = "0, 1" if world_size == 3 else "0, 1, 3"
    with pytest.raises(AgreementError, match=rf"3\.bias differ: hash \w+ on ranks {others}; hash \w+ on rank 2\.\n"):
        check_copies(model)


@pytest.mark.parametrize("norm_type", [2, 1, inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.mpi(sizes=(1,))
def test_the_norm_of_a_large_gradient_has_seven_digits(make_grid, norm_type, dtype):
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(1021, 2053, generator=generator).to(dtype).t(), torch.zeros(0, 3), torch.full((5,), -2.0)]
    whole = torch.cat([one.double().flatten() for one in gradients])
    (norm,), _ = norms_and_votes([[(one, True) for one in gradients]], make_grid(x=1), [0], norm_type)
    assert abs(norm / torch.linalg.vector_norm(whole, norm_type).item() - 1) <= 2e-7


@pytest.mark.mpi(sizes=(2, 6))
def test_words_are_those_of_an_all_reduce_of_one_complex_word_or_of_one_a_parameter(make_grid, world_size):
    axes = {2: {"x": 1, "y": 2, "z": 1}, 6: {"x": 1, "y": 3, "z": 2}}[world_size]
    on_grid, model, _ = both(make_grid, "cuboid", "copied", axes, check=False)
    ranks, index, many = world_size, on_grid.grid.world.index, 6

    def words(call: Any) -> tuple[int, int]:
        with on_grid.grid.ledger.watch() as moved:
            call()
        return moved.words, moved.calls

    def all_reduce(n: int) -> int:
        return n + (ranks - 2) * (n // ranks + (index < n % ranks))

    assert words(lambda: clip_grad_norm_(model, 1.0)) == (all_reduce(1), 1)
    assert words(lambda: grad_norm(model, each=True)) == (all_reduce(many), 1)
    assert words(lambda: grad_norm(model, inf)) == (ranks - 1, 1)
    assert words(lambda: check_copies(model)) == ((ranks - 1) * many, 1)


@pytest.mark.mpi(sizes=(4, 6))
def test_replicas_whose_gradients_were_summed_count_once(make_grid, world_size):
    axes = {4: {"z": 2, "dp": 2}, 6: {"y": 3, "dp": 2}}[world_size]
    grid, plain = make_grid(**axes), plain_model()
    on_grid = scheme("cuboid", grid)
    model, half = split_model(on_grid, plain), ROWS // 2
    rows = batch()[grid.coordinates["dp"] * half :][:half]
    backward(model, block_of(rows, on_grid))
    for p in model.parameters():
        grid["dp"].all_reduce(p.grad, into=p.grad)
    backward(plain, batch())
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
    assert clip_grad_norm_(model, 0.1).item() == pytest.approx(want, rel=1e-12)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, own(ours, theirs.grad), rtol=1e-12, atol=1e-16)
    check_copies(model)


@pytest.mark.mpi(sizes=(4,))
def test_each_stage_of_a_pipeline_adds_what_it_holds(comm, make_grid):
    """Of a stage's layer the others hold empty blocks; a table that both hold counts once."""
    grid = make_grid(z=2, pp=2)
    on_grid = scheme("cuboid", grid)
    first, second = (Linear(10, 13, on_grid.on(pp=(index,)), dtype=torch.float64) for index in range(2))
    tied = Linear(10, 13, on_grid.on(pp=(0, 1)), dtype=torch.float64)
    model, generator = torch.nn.ModuleList([first, second, tied]), torch.Generator().manual_seed(0)
    squares = []
    for p in model.parameters():
        whole = torch.randn(p.sharding.shape, generator=generator, dtype=torch.float64)
        squares.append(whole.square().sum().item())
        p.data = distribute(whole, grid, p.sharding.layout)
        p.grad = p.data.clone() if p.numel() else None
    assert grad_norm(model).item() == pytest.approx(sum(squares) ** 0.5, rel=1e-12)
    assert grad_norm(model, each=True).square().tolist() == pytest.approx(squares, rel=1e-12)
    check_copies(model)
    if comm.rank == 0:
        with torch.no_grad():
            model[2].weight += 1
    with pytest.raises(AgreementError, match=r"copies of 2\.weight differ"):
        check_copies(model)


class WithPlain(torch.nn.Module):
    """A layer of torch's own on the rows of each rank, behind one on the grid."""

    def __init__(self, on_grid: Any, summed: bool) -> None:
        super().__init__()
        self.on_grid, self.summed = on_grid, summed
        self.up = Linear(WIDTH, INNER, on_grid, dtype=torch.float64)
        initialise(self.up, on_grid, seed=1)
        self.scale = torch.nn.Parameter(torch.full((), 1.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = sum_gradient(self.scale.reshape(1), self.on_grid.grid.world) if self.summed else self.scale
        return self.up(x) * scale


@pytest.mark.mpi(sizes=(1, 3, 4))
def test_a_plain_parameter_whose_gradient_was_summed_counts_once(make_grid, world_size):
    axes = {1: {"x": 1}, 3: {"y": 3}, 4: {"x": 2, "z": 2}}[world_size]
    on_grid = scheme("cuboid", make_grid(**axes))
    model = WithPlain(on_grid, summed=True)
    model(block_of(batch(), on_grid)).square().sum().backward()
    whole = [torch.linalg.vector_norm(model.scale.grad).item(), *grad_norm(model.up, each=True).tolist()]
    assert grad_norm(model).item() == pytest.approx(torch.tensor(whole, dtype=torch.float64).norm().item(), rel=1e-12)
    check_copies(model)


@pytest.mark.mpi(sizes=(3,))
@pytest.mark.parametrize("norm_type", [2.0, inf], ids=str)
@pytest.mark.parametrize("each", [False, True])
def test_a_plain_parameter_whose_gradient_was_not_summed_is_refused_by_name(make_grid, norm_type, each):
    on_grid = scheme("cuboid", make_grid(y=3))
    model = WithPlain(on_grid, summed=False)
    model(block_of(batch(), on_grid)).square().sum().backward()
    with pytest.raises(AgreementError, match=r"gradient of scale: hash \w+ on rank 0; .*\n.*sum_gradient"):
        grad_norm(model, norm_type, each=each)


@pytest.mark.mpi(sizes=(1, 2, 6))
def test_parameters_without_a_gradient_on_all_ranks_are_left_out(make_grid, world_size):
    axes = {1: {"x": 1}, 2: {"y": 2}, 6: {"y": 3, "z": 2}}[world_size]
    _, model, plain = both(make_grid, "cuboid", "copied", axes)
    model[1].weight.grad = plain[1].weight.grad = None
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01).item()
    assert clip_grad_norm_(model, 0.01).item() == pytest.approx(want, rel=1e-12)
    assert model[1].weight.grad is None and grad_norm(model, each=True)[2] == 0


@pytest.mark.mpi(sizes=(2, 3))
@pytest.mark.parametrize("lacks", [0, 1])
def test_a_gradient_that_some_ranks_lack_is_an_error_on_all_that_names_it(comm, make_grid, world_size, lacks):
    _, model, _ = both(make_grid, "cuboid", "copied", {"y": world_size})
    if comm.rank == lacks:
        model[1].weight.grad = None
    with pytest.raises(AgreementError, match=rf"gradient of 1\.weight: .*none on rank {lacks}"):
        clip_grad_norm_(model, 1.0)


@pytest.mark.mpi(sizes=(2,))
def test_limits_that_differ_between_ranks_are_an_error_on_all_and_clip_nothing(comm, make_grid):
    for check in (False, True):
        _, model, _ = both(make_grid, "cuboid", "copied", {"y": 2}, check=check)
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(AgreementError, match=r"max_norm: 0\.1 on rank 0; 0\.2 on rank 1"):
            clip_grad_norm_(model, 0.1 * (1 + comm.rank))
        assert all(torch.equal(p.grad, was) for p, was in zip(model.parameters(), before, strict=True))


@pytest.mark.mpi(sizes=(1, 2))
@pytest.mark.parametrize("norm_type", [2.0, 1.0, inf], ids=str)
@pytest.mark.parametrize("wrong", [float("nan"), inf])
def test_a_norm_that_is_not_finite_is_so_on_all_ranks_and_raises_where_asked(comm, make_grid, world_size, norm_type, wrong):
    _, model, _ = both(make_grid, "oned", "copied", {"y": world_size})
    if comm.rank == world_size - 1:
        model[3].bias.grad[1] = wrong  # of which rank 0 counts its own copy
    norm = grad_norm(model, norm_type).item()
    assert norm == wrong or (norm != norm and wrong != wrong)
    with pytest.raises(Summa3dError, match=rf"norm of the gradients is (nan|inf)\. .*: 3\.bias on rank {world_size - 1}"):
        clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
    assert torch.isfinite(model[1].weight.grad).all()
    clip_grad_norm_(model, 1.0, norm_type)
    assert (model[1].weight.grad == 0).all() if wrong == inf else model[1].weight.grad.isnan().all()


@pytest.mark.mpi(sizes=(2,))
def test_what_cannot_be_clipped_is_refused_in_a_line(make_grid):
    _, model, plain = both(make_grid, "oned", "copied", {"y": 2})
    _, other, _ = both(make_grid, "oned", "copied", {"y": 2})
    with pytest.raises(GridError, match="none of the 6 parameters belongs to a layer of summa3d"):
        clip_grad_norm_(plain, 1.0)
    with pytest.raises(GridError, match="parameters lie on 2 grids"):
        grad_norm([*model.parameters(), *other.parameters()])
    with pytest.raises(ConfigError, match=r"norm_type is 1, 2 or inf; it is 3\."):
        grad_norm(model, 3.0)
    with pytest.raises(ConfigError, match="max_norm is a number, 0 or more; it is -1"):
        clip_grad_norm_(model, -1)
    with pytest.raises(ConfigError, match=r"parameter 0 .* is a str"):
        clip_grad_norm_(["weight"], 1.0)


@pytest.mark.mpi(sizes=(2,))
def test_copied_models_know_their_grid_and_pickled_parameters_need_none(make_grid):
    _, model, _ = both(make_grid, "oned", "copied", {"y": 2})
    other = copy.deepcopy(model)
    check_copies(other)
    file = io.BytesIO()
    torch.save(list(other.parameters()), file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert [p.sharding for p in read] == [p.sharding for p in model.parameters()]
    assert all(torch.equal(one, p) for one, p in zip(read, model.parameters(), strict=True))


@pytest.mark.mpi(sizes=(4,))
def test_holders_of_a_block_are_the_ranks_with_equal_slices_of_the_whole(comm, make_grid):
    _, model, _ = both(make_grid, "cuboid", "copied", {"x": 2, "y": 2, "z": 1})
    for p in model.parameters():
        held = comm.allgather(str(p.sharding.slices(p.grid)))
        assert first_holders(p.sharding, p.grid).tolist() == [held.index(one) for one in held]
