"""Products of torch's host tensors by the process's BLAS: when it is taken, that it multiplies as torch does, by which rule."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product as pairs_of

import pytest
import torch

from summa3d import blas_library
from summa3d.autograd import matmul, product
from summa3d.blas_library import EVERY_SIZE, TORCH, BlasRule, common_rule
from summa3d.comm.grid import Grid
from summa3d.gemm.algorithms.cuboid import CuboidPlan
from summa3d.gemm.local.blas import accumulate
from summa3d.gemm.local.multiply import multiply
from summa3d.gemm.local.tensors import multiplied

RULE = BlasRule(blas_library.library_name(), "a test", EVERY_SIZE, 2)
ERROR = {torch.float32: 1e-5, torch.float64: 1e-12}
pytestmark = pytest.mark.skipif(blas_library.at_addresses("float32") is None, reason="numpy's BLAS cannot be called by address")


def block(rows, columns, seed, dtype=torch.float64):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operand(rows, columns, letter, seed, dtype, kind):
    """A matrix whose op is rows × columns: dense, every second row of a larger one, or columns out of the middle."""
    shape = (rows, columns) if letter == "n" else (columns, rows)
    if kind == "rows":
        return block(2 * shape[0], shape[1], seed, dtype)[::2]
    return block(shape[0], shape[1] + 5, seed, dtype)[:, 3:-2] if kind == "columns" else block(*shape, seed, dtype)


def turned(matrix, letter):
    return matrix if letter == "n" else matrix.T


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("kind", ["dense", "rows", "columns"])
def test_the_library_multiplies_as_torch_does(dtype, kind):
    m, n, k = 97, 131, 89
    for form, (alpha, beta) in pairs_of(("nn", "nt", "tn", "tt"), ((1, 0), (0.5, -2))):
        a, b = operand(m, k, form[0], 1, dtype, kind), operand(k, n, form[1], 2, dtype, kind)
        out = block(m, n + 3, 3, dtype)[:, 1:-2]
        expected = alpha * turned(a, form[0]).double() @ turned(b, form[1]).double() + beta * out.double()
        assert multiplied(a, b, form, out, alpha, beta, RULE) is out
        assert torch.linalg.norm(out - expected) <= ERROR[dtype] * torch.linalg.norm(expected), (form, alpha, beta)


def test_what_torch_would_leave_alone_is_never_read():
    out = torch.full((128, 128), torch.nan)
    assert multiplied(torch.ones(128, 128), torch.ones(128, 128), "nn", out, 1, 0, RULE) is not None
    assert torch.equal(out, torch.full((128, 128), 128.0))


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that would see torch's own product."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    """A tensor of another type, which may have its own product."""


class Named(torch.nn.Parameter):
    """A parameter that knows more of itself, as those of the layers do."""


class Own(torch.nn.Parameter):
    """A parameter with its own product."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Dispatched(torch.nn.Parameter):
    """A parameter that sees torch's own product."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def tensors(**changed):
    return {"a": block(128, 128, 1), "b": block(128, 128, 2), "out": torch.zeros(128, 128, dtype=torch.float64)} | changed


NOT_PLAIN = {
    "a gradient of A is recorded": (lambda: tensors(a=block(128, 128, 1).requires_grad_()), nullcontext),
    "A is negative by a bit": (lambda: tensors(a=torch._neg_view(block(128, 128, 1))), nullcontext),
    "autocast": (tensors, lambda: torch.autocast("cpu", torch.bfloat16)),
    "a dispatch mode": (tensors, Mode),
    "without memory": (lambda: {name: one.to("meta") for name, one in tensors().items()}, nullcontext),
    "another type": (lambda: tensors(b=block(128, 128, 2).as_subclass(Marked)), nullcontext),
    "a parameter of another type": (lambda: tensors(b=Own(block(128, 128, 2), False)), nullcontext),
    "a parameter that torch dispatches": (lambda: tensors(b=Dispatched(block(128, 128, 2), False)), nullcontext),
    "16 bits": (lambda: {name: one.bfloat16() for name, one in tensors().items()}, nullcontext),
    "whole numbers": (lambda: {name: one.long() for name, one in tensors().items()}, nullcontext),
    "two dtypes": (lambda: tensors(b=block(128, 128, 2).float()), nullcontext),
    "rows overlap": (lambda: tensors(a=block(1, 128, 1).expand(128, 128)), nullcontext),
    "nothing adjacent": (lambda: tensors(a=block(256, 256, 1)[::2, ::2]), nullcontext),
    "small": (lambda: {name: one[:95, :95] for name, one in tensors().items()}, nullcontext),
    "one row": (
        lambda: tensors(a=block(1, 128 * 128, 1), b=block(128 * 128, 128, 2), out=torch.zeros(1, 128).double()),
        nullcontext,
    ),
}


@pytest.mark.parametrize("why", NOT_PLAIN)
def test_all_else_is_torchs_and_nothing_is_done(why):
    make, context = NOT_PLAIN[why]
    given = make()
    before = given["out"].clone()
    with context():
        assert None is multiplied(given["a"], given["b"], "nn", given["out"], 1, 0, RULE)
    assert given["out"].is_meta or torch.equal(given["out"], before)
    assert given["out"]._version == before._version


@pytest.mark.parametrize("kind", [torch.nn.Parameter, Named])
def test_parameters_are_the_librarys_too(kind):
    given = tensors(b=kind(block(128, 128, 2)))
    with torch.no_grad():
        assert multiplied(given["a"], given["b"], "nn", given["out"], 1, 0, RULE) is given["out"]
    assert torch.linalg.norm(given["out"] - given["a"] @ given["b"]) <= 1e-12 * torch.linalg.norm(given["out"])


def test_under_a_transformation_the_product_is_torchs():
    a, b = block(128, 128, 1), torch.stack([block(128, 128, 2), block(128, 128, 3)])
    found = torch.vmap(lambda one: multiply(a, one, "nn", rule=RULE))(b)
    assert torch.allclose(found, a @ b)


def test_nothing_to_sum_scales_by_beta():
    out = torch.full((512, 512), 3.0)
    accumulate(torch.ones(512, 0), torch.ones(0, 512), "nn", out, 1, 0.5, rule=RULE)
    assert torch.equal(out, torch.full((512, 512), 1.5))


def test_autograd_notices_what_was_overwritten():
    out, weight = torch.ones(128, 128), torch.ones(128, 128, requires_grad=True)
    kept = (weight * out).sum()
    with torch.no_grad():
        assert multiplied(torch.ones(128, 128), weight, "nn", out, 1, 0, RULE) is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_the_library_takes_as_many_threads_as_torch():
    threads, set_threads = blas_library._thread_count()
    if threads is None:
        pytest.skip("this BLAS has no function for its threads")
    before = torch.get_num_threads()
    try:
        for count in (2, 1):
            set_threads(count)
            taken = threads()  # MKL takes no more than there are physical cores
            set_threads(3 - count)
            torch.set_num_threads(count)
            assert multiplied(torch.ones(128, 128), torch.ones(128, 128), "nn", torch.empty(128, 128), 1, 0, RULE) is not None
            assert threads() == taken
    finally:
        torch.set_num_threads(before)
        blas_library.follow_threads(before)


@pytest.fixture
def processor(monkeypatch):
    """A function: the rule on a processor of this vendor, family and features, with SUMMA3D_BLAS (None: unset)."""

    def on(vendor, family, *features, wanted=None):
        for kept in (blas_library.library, blas_library.gemm, blas_library.rule_for_tensors):
            kept.cache_clear()
        monkeypatch.setattr(blas_library, "_has", lambda word: word in (vendor, *features))
        monkeypatch.setattr(blas_library, "_family", lambda: family)
        monkeypatch.setattr(blas_library, "_mkl_file", lambda: None)
        monkeypatch.delenv("SUMMA3D_BLAS", raising=False) if wanted is None else monkeypatch.setenv("SUMMA3D_BLAS", wanted)
        return blas_library.rule_for_tensors()

    yield on
    for kept in (blas_library.library, blas_library.gemm, blas_library.rule_for_tensors):
        kept.cache_clear()


def test_the_rule_goes_by_the_processor_and_the_variable(processor):
    zen5 = processor("AuthenticAMD", 26, "avx512f")
    if "OpenBLAS" not in zen5.name:
        pytest.skip("numpy's BLAS is no OpenBLAS")
    assert zen5.worth == EVERY_SIZE
    zen4 = processor("AuthenticAMD", 25, "avx512f")
    assert zen4.name == zen5.name and zen4.worth["float32"] > zen5.worth["float32"]
    for other in (processor("AuthenticAMD", 25), processor("GenuineIntel", 6, "avx512f")):
        assert other.name == TORCH and not other.worth
    assert processor("AuthenticAMD", 26, "avx512f", wanted="torch").name == TORCH
    assert processor("GenuineIntel", 6, wanted="numpy")[2:] == (EVERY_SIZE, 2)


def test_mixed_ranks_multiply_by_torch():
    other = RULE._replace(name="another")
    assert common_rule([RULE, RULE]) == RULE
    assert common_rule([RULE, other]).worth == {} and "another" in common_rule([RULE, other]).reason


@pytest.mark.mpi(sizes=(2,))
def test_the_ranks_of_a_grid_take_one_rule(comm, monkeypatch):
    from summa3d.comm import job

    for mine, name in ((RULE, RULE.name), (RULE if comm.rank else BlasRule(TORCH, "", {}), TORCH)):
        monkeypatch.setattr(job, "rule_for_tensors", lambda mine=mine: mine)
        with Grid(comm, {"x": 2}) as made:
            assert made.job.blas.name == name


@pytest.mark.mpi(sizes=(4,))
def test_a_product_and_its_gradients_are_those_of_torch(comm):
    results = {}
    for rule in (BlasRule(TORCH, "", {}), RULE):
        with Grid(comm, {"x": 1, "y": 2, "z": 2}) as grid:
            grid.job.blas = rule
            bound = product(CuboidPlan("nn", 331, 251, 463), grid)
            a, b = (block(*shape, 7 + comm.rank).requires_grad_() for shape in (bound.cuboid.a_block, bound.cuboid.b_block))
            c = matmul(a, b, bound)
            c.backward(block(*c.shape, 20 + comm.rank))
            results[rule.name] = [one.detach().clone() for one in (c, a.grad, b.grad)]
    of_torch, of_library = results.values()
    for one, other in zip(of_torch, of_library, strict=True):
        assert torch.linalg.norm(one - other) <= 1e-13 * torch.linalg.norm(one)
