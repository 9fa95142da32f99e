"""Every scheme is the same transformer.

Loss, every raw gradient and all weights equal plain torch's; its words are its formula's.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from nn_oracle.volume import GPTVolume
from nn_parity import gradient_norm
from pairs import some
from scheme_table import FAMILIES, GPT2, GRIDS, check_against_plain_torch, rows_for, sequence_for, tokens_and_labels

from summa3d import blas_library
from summa3d.blas_library import BlasRule
from summa3d.comm.grid import Place
from summa3d.errors import GridError, LayoutError
from summa3d.gemm.local.tensors import multiplied
from summa3d.layout import distribute
from summa3d.nn import GPT, ModelConfig, scheme
from summa3d.nn.schemes.scheme import SCHEMES, Scheme

CASES = [(ranks, name, family) for ranks, grids in GRIDS.items() for name, _ in grids for family in FAMILIES]


@pytest.mark.mpi(sizes=tuple(GRIDS), every=True)
@pytest.mark.parametrize("cases", [some(CASES), pytest.param(CASES, marks=pytest.mark.wide)], ids=["pairs", "all"])
def test_loss_and_every_raw_gradient_equal_plain_torch(make_grid, world_size, cases):
    for name, axes in GRIDS[world_size]:
        for family in FAMILIES:
            if (world_size, name, family) in cases:
                check_against_plain_torch(FAMILIES[family], scheme(name, make_grid(**axes)))


@pytest.mark.mpi(sizes=(8,))
@pytest.mark.parametrize("order", ["z,y,x,dp,pp", "pp,z,y"])
@pytest.mark.parametrize("family, name", [("bert", "summa"), ("llama", "cuboid-sequence"), ("gpt2", "oned")])
def test_inside_a_job_of_replicas_and_stages_a_model_is_that_of_its_inner_grid(make_grid, family, name, order):
    axes = {"y": 2, "z": 2} if name == "cuboid-sequence" else {"x": 2, "y": 2} if name == "summa" else {"y": 4}
    job = make_grid(**axes, dp=1, pp=2, order=[axis for axis in order.split(",") if axis in (*axes, "dp", "pp")])
    on_grid = scheme(name, job)
    assert on_grid.whole is job and on_grid.grid.size == 4 and not {"dp", "pp"} & set(on_grid.grid.shape)
    check_against_plain_torch(FAMILIES[family], on_grid)
    assert not any("pp" in row.axis or "dp" in row.axis for row in job.ledger.rows())


@pytest.mark.mpi(sizes=(27,))
@pytest.mark.parametrize("family", ["llama", pytest.param("bert", marks=pytest.mark.wide)])
@pytest.mark.wide
def test_one_cube_of_27_ranks(make_grid, family):
    check_against_plain_torch(FAMILIES[family], scheme("cuboid", make_grid(x=3, y=3, z=3)))


@pytest.mark.mpi(sizes=tuple(GRIDS))
def test_weights_are_bitwise_those_of_one_rank(make_grid, world_size):
    serial = dict(GPT(GPT2, scheme("serial"), torch.float64, seed=3).named_parameters())
    for name, axes in GRIDS[world_size]:
        on_grid = scheme(name, make_grid(**axes))
        for parameter_name, parameter in GPT(GPT2, on_grid, torch.float64, seed=3).named_parameters():
            want = distribute(serial[parameter_name].data, on_grid.grid, parameter.sharding.layout)
            assert torch.equal(parameter.data, want), (name, parameter_name)


@pytest.mark.mpi(sizes=tuple(size for size in GRIDS if size < 12))
def test_a_step_moves_exactly_the_words_and_messages_of_its_formula(make_grid, world_size):
    """On twelve ranks the other families do: test_volume_models.py."""
    for name, axes in GRIDS[world_size]:
        on_grid = scheme(name, grid := make_grid(**axes))
        model = GPT(GPT2, on_grid, torch.float64)
        tokens, labels = tokens_and_labels(GPT2, rows_for(on_grid), sequence_for(on_grid, GPT2.sequence))
        with grid.ledger.watch() as forward:
            loss = model(tokens, labels)
        with grid.ledger.watch() as backward:
            loss.backward()
        with grid.ledger.watch() as optimizer:
            gradient_norm(model.parameters(), grid)
        cost = GPTVolume(GPT2, on_grid, *tokens.shape).step()
        for moved, said in ((forward, cost.forward), (backward, cost.backward), (optimizer, cost.optimizer)):
            assert (moved.words, moved.messages) == (said.words, said.messages), (name, axes)


@pytest.mark.skipif(blas_library.at_addresses("float64") is None, reason="numpy's BLAS cannot be called by address")
@pytest.mark.mpi(sizes=(1, 2, 4))
def test_the_library_of_the_rule_multiplies_everything(make_grid, world_size, monkeypatch):
    """Gathered or not, weights are multiplied by the faster library; torch's own product would be slower, and as right."""
    taken = []

    def watched(*operands):
        product = multiplied(*operands)
        taken.append(product is not None)
        return product

    for module in ("multiply", "blas"):
        monkeypatch.setattr(f"summa3d.gemm.local.{module}.multiplied", watched)
    for name, axes in GRIDS[world_size]:
        on_grid = scheme(name, make_grid(**axes))
        on_grid.grid.job.blas = BlasRule(blas_library.library_name(), "a test", {"float64": 1}, 1)
        tokens, labels = tokens_and_labels(GPT2, rows_for(on_grid), sequence_for(on_grid, GPT2.sequence))
        taken.clear()
        GPT(GPT2, on_grid, torch.float64)(tokens, labels).backward()
        assert len(taken) >= 3 * 4 * GPT2.layers and all(taken), (name, axes, taken)


@pytest.mark.mpi(sizes=(2, 3, 4, 6, 8))
def test_the_gradient_norm_counts_every_element_once(make_grid, world_size):
    config, norms = GPT2, []
    for name, axes in [("serial", None), *GRIDS[world_size]]:
        on_grid = scheme(name, None if axes is None else make_grid(**axes))
        model = GPT(config, on_grid, torch.float64, seed=3).eval()
        model(*tokens_and_labels(config, 12, 12)).backward()
        norms.append(gradient_norm(model.parameters(), on_grid.grid))
    assert all(abs(norm - norms[0]) <= 1e-12 * norms[0] for norm in norms), norms


@pytest.mark.mpi(sizes=(2, 4, 8))
def test_next_logits_of_a_prompt_of_any_length_are_those_of_one_rank(make_grid, world_size):
    serial = GPT(GPT2, scheme("serial"), torch.float64).eval()
    for name, axes in GRIDS[world_size]:
        on_grid = scheme(name, make_grid(**axes))
        tokens, _ = tokens_and_labels(GPT2, rows_for(on_grid), 5)
        got = GPT(GPT2, on_grid, torch.float64).eval().next_logits(tokens)
        assert torch.allclose(got, serial.next_logits(tokens), rtol=1e-12, atol=1e-14), name


def mean_words(name: str, axes: dict[str, int], b: int, s: int, config: ModelConfig, regather: bool) -> tuple[Fraction, Fraction]:
    """Words of a block's linears, forward and backward, averaged over the ranks of a grid without processes."""
    ranks = Place(axes).size
    costs = [GPTVolume(config, scheme(name, Place(axes, rank), regather), b, s).linears() for rank in range(ranks)]
    return tuple(Fraction(sum(getattr(cost, phase).words for cost in costs), ranks) for phase in ("forward", "backward"))


@pytest.mark.parametrize("h", [24, 36])
def test_a_blocks_linears_move_the_mean_words_of_the_design(h):
    b, s = 12, 12
    e, w = b * s * h, 12 * h * h
    config = ModelConfig(layers=1, hidden=h, heads=12, sequence=s, vocabulary=37)

    def words(name, regather=True, **axes):
        return mean_words(name, axes, b, s, config, regather)

    for p in (1, 2, 3, 4, 6):
        assert words("oned", y=p) == (Fraction(4 * (p - 1) * e, p), Fraction(4 * (p - 1) * e, p))
        one_way = Fraction(4 * (p - 1) * e, p)
        assert words("oned-sp", False, x=1, y=p, z=1) == (one_way, one_way)
        assert words("oned-sp", True, x=1, y=p, z=1) == (one_way, one_way + Fraction(2 * (p - 1) * e, p))
    for r, c in ((1, 2), (2, 2), (2, 3), (3, 4), (4, 4)):
        forward = Fraction((c - 1) * 7 * e + (r - 1) * w, r * c)
        assert words("summa", x=r, y=c) == (forward, 2 * forward)
        forward = Fraction((c - 1) * 4 * e + (r - 1) * w, r * c)
        assert words("summa-transposed", x=r, y=c) == (forward, 2 * forward)
    for q, d in ((2, 1), (2, 2), (2, 3), (3, 2)):
        forward = Fraction(q - 1, q * q) * (Fraction(7 * e, d) + w)
        assert words("tesseract", x=q, y=q, d=d) == (forward, 2 * forward + Fraction(2 * (d - 1) * w, d * q * q))
    for name in ("cuboid", "cuboid-sequence"):
        for x, y, z in ((2, 2, 2), (1, 2, 3), (3, 1, 2), (1, 1, 4), (2, 3, 2)):
            axes, ranks = {"x": x, "y": y, "z": z}, x * y * z
            forward = Fraction(4 * (y - 1) * e + 12 * (z - 1) * e + (x - 1) * w, ranks)
            again = Fraction(6 * (y - 1) * e + 17 * (z - 1) * e + 2 * (x - 1) * w, ranks)
            assert words(name, False, **axes) == (forward, forward)
            assert words(name, True, **axes) == (forward, again)


@pytest.mark.parametrize(
    ("name", "axes", "says"),
    [
        ("oned", {"x": 2, "y": 2}, ["oned", "x=2,y=2", "y=4"]),
        ("agarwal", {"x": 2, "y": 2, "z": 1}, ["agarwal", "1 (x=1,y=1,z=1)", "8 (x=2,y=2,z=2)"]),
        ("oned-sp", {"z": 3}, ["oned-sp", "x=1,y=3,z=1"]),
        ("summa", {"x": 2, "y": 2, "z": 2}, ["summa", "z=2", "x=2,y=4"]),
        ("tesseract", {"x": 2, "y": 3}, ["tesseract", "x=2,y=3", "x=1,y=1,d=6"]),
        ("tesseract", {"x": 2, "d": 2}, ["x=2,y=2,d=1"]),
        ("cuboid", {"x": 2, "d": 2}, ["cuboid", "x=2,y=2,z=1"]),
        ("serial", {"x": 2}, ["serial", "1 (x=1,y=1,z=1)"]),
    ],
)
def test_a_grid_that_a_scheme_cannot_use_is_named_with_those_it_can(name, axes, says):
    with pytest.raises(GridError) as raised:
        scheme(name, Place(axes))
    for text in says:
        assert text in str(raised.value)


def test_an_unknown_scheme_and_a_missing_grid_are_named():
    with pytest.raises(LayoutError, match=", ".join(SCHEMES)):
        scheme("cubiod", Place({"x": 2}))
    for name in SCHEMES[1:]:
        with pytest.raises(GridError, match=f"{name} scheme needs a grid"):
            scheme(name)


@pytest.mark.parametrize(
    ("name", "axes", "sizes", "says"),
    [
        ("oned", {"y": 5}, {}, ["heads 8", "y = 5", "5, 10", "fit heads 8: none"]),
        ("oned-sp", {"y": 4}, {"sequence": 126}, ["sequence 126", "y = 4", "124, 128"]),
        ("summa", {"x": 4, "y": 1}, {"batch": 6}, ["batch 6", "x = 4", "x=2,y=2"]),
        ("tesseract", {"x": 2, "y": 2, "d": 3}, {"batch": 8}, ["batch 8", "d·x = 6", "6, 12"]),
        ("cuboid-sequence", {"y": 4, "z": 4}, {}, ["heads 8", "y·z = 16", "x=2,y=1,z=8"]),
        ("cuboid-sequence", {"x": 2, "z": 2}, {"batch": 3}, ["batch 3", "x = 2", "x=1,y=2,z=2"]),
    ],
)
def test_a_size_that_a_scheme_splits_unevenly_is_named_with_what_would_fit(name, axes, sizes, says):
    sizes = {"batch": 24, "sequence": 128, **sizes}
    with pytest.raises(LayoutError) as raised:
        Scheme.of(name, axes).check_even(ModelConfig(), sizes["batch"], sizes["sequence"])
    for text in says:
        assert text in str(raised.value), str(raised.value)
