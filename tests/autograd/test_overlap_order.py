"""What is in flight when: gathers before the product they are not for, sums during the next one; and what hooks see.

That results are the same bits: test_overlap.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from summa3d.autograd import differentiable as products
from summa3d.autograd.recompute import recompute
from summa3d.comm.collective import Collective, Copied
from summa3d.gemm.algorithms.cuboid import Cuboid
from summa3d.nn import Linear, initialise, scheme
from summa3d.nn.overlap import Overlap

WIDTHS = (8, 5, 7, 3)
"""Of a stack of three linears, told apart by their numbers of columns."""
GRID = {"x": 2, "y": 2, "z": 1}


class Chain(nn.Module):
    """Linears one after the other, in the order that `turns` names; each computed again in backward, with `again`."""

    def __init__(self, plan: Any, widths: Sequence[int] = WIDTHS, follow: bool = True) -> None:
        super().__init__()
        self.plan, self.turns, self.again, layout, layers = plan, list(range(len(widths) - 1)), False, None, []
        for k, n in pairwise(widths):
            layers.append(Linear(k, n, plan, layout, bias=False, dtype=torch.float64))
            layout = layers[-1].output_layout
        self.layers = nn.ModuleList(layers)
        initialise(self, plan, 1)
        if follow and plan.prefetcher is not None:
            plan.prefetcher.follow(self)

    def forward(self, x: Tensor) -> Tensor:
        for turn in self.turns:
            layer = self.layers[turn]
            x = recompute(layer, [x], [layer]) if self.again else layer(x)
        return x


def input_for(rank: int, k: int = WIDTHS[0]) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 3, k, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return what happens along x, and products, in their order: a collective is named by the columns of what it carries."""
    log: list[str] = []

    original_start = Collective.start
    shorts = {"all_gather": "gather", "reduce_scatter": "scatter"}

    def start(collective: Collective, array: Any, *args: Any) -> Any:
        pending = original_start(collective, array, *args)
        axis, short = collective.calls, shorts.get(collective.route.operation)
        if axis.label != "x" or axis.size == 1 or short is None:
            return pending
        what, wait, waited = f"{short} {array.shape[-1]}", pending.wait, []

        def wait_once() -> Any:
            if not waited:
                waited.append(log.append(f"wait {what}"))
            return wait()

        log.append(f"start {what}")
        pending.wait = wait_once
        return pending

    def counted(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (log.append(what), original(*args))[1])

    monkeypatch.setattr(Collective, "start", start)
    counted(Cuboid, "multiply", "product")
    counted(products, "local", "gradient")
    yield log


def taken(events: list[str]) -> list[str]:
    """The events so far, which begin anew."""
    found = events[:]
    events.clear()
    return found


def columns(chain: Chain) -> list[int]:
    """The columns of each layer's block."""
    return [layer.weight.shape[1] for layer in chain.layers]


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("node_memory", [True, False], ids=["node", "mpi"])
def test_each_gather_is_started_before_the_product_of_the_layer_before(comm, make_grid, events, node_memory):
    grid = make_grid(check=False, node_memory=node_memory, **GRID)
    chain = Chain(scheme("cuboid", grid, overlap=Overlap(gather=1)))
    p, q, r = columns(chain)
    x = input_for(comm.rank)
    cold = [f"{what} gather {n}" for n in (p, q, r) for what in ("start", "wait")]
    for turn in range(3):
        y = chain(x)
        forward = [event for event in taken(events) if event != "product"] if turn == 0 else taken(events)
        y.sum().backward()
        backward = [event for event in taken(events) if "scatter" not in event]
        if turn == 0:
            assert forward == cold
            continue
        assert forward == [
            f"start gather {p}",
            *(f"wait gather {p}", f"start gather {q}", "product"),
            *(f"wait gather {q}", f"start gather {r}", "product"),
            *(f"wait gather {r}", "product"),
        ]
        assert backward == [
            f"start gather {r}",
            *(f"wait gather {r}", f"start gather {q}", "gradient", "gradient"),
            *(f"wait gather {q}", f"start gather {p}", "gradient", "gradient"),
            *(f"wait gather {p}", "gradient", "gradient"),
        ]


@pytest.mark.mpi(sizes=(4,))
def test_what_is_computed_again_gathers_ahead_too(comm, make_grid, events):
    chain = Chain(scheme("cuboid", make_grid(check=False, **GRID), overlap=Overlap(gather=1)))
    chain.again = True
    p, q, r = columns(chain)
    for _ in range(2):
        y = chain(input_for(comm.rank))
        events.clear()
        y.sum().backward()
    assert [event for event in events if "scatter" not in event] == [
        f"start gather {r}",
        *(f"wait gather {r}", f"start gather {r}", "product", f"wait gather {r}", f"start gather {q}", "gradient", "gradient"),
        *(f"wait gather {q}", f"start gather {q}", "product", f"wait gather {q}", f"start gather {p}", "gradient", "gradient"),
        *(f"wait gather {p}", f"start gather {p}", "product", f"wait gather {p}", "gradient", "gradient"),
    ]


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("flies", [True, False])
def test_an_inputs_sum_is_in_flight_during_the_weights_product_if_the_switch_says_so(comm, make_grid, monkeypatch, flies):
    log: list[str] = []
    local, starts = products.local, {kind: kind.start for kind in (Collective, Copied)}

    def started(collective: Collective, *args: Any) -> Any:
        pending = starts[type(collective)](collective, *args)
        if collective.route.operation != "reduce_scatter":
            return pending
        log.append("start")
        wait = pending.wait
        pending.wait = lambda: (log.append("wait"), wait())[1]
        return pending

    for kind in starts:
        monkeypatch.setattr(kind, "start", started)
    monkeypatch.setattr(products, "local", lambda *args: (log.append("gradient"), local(*args))[1])
    plan = scheme("cuboid", make_grid(check=False, y=2), overlap=Overlap(input_gradient=flies))
    Chain(plan, (8, 5))(input_for(comm.rank)).sum().backward()
    first = log[: log.index("wait") + 1] if flies else log[:4]
    assert first == (["gradient", "start", "gradient", "wait"] if flies else ["gradient", "start", "wait", "gradient"])


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_hooks_see_complete_gradients(comm, make_grid, again):
    def gradients(overlap: Overlap) -> list[list[Tensor]]:
        chain = Chain(scheme("cuboid", make_grid(check=False, **GRID), overlap=overlap))
        after: dict[int, Tensor] = {}
        before: dict[int, Tensor] = {}
        for index, layer in enumerate(chain.layers):
            layer.weight.register_hook(lambda grad, index=index: before.update({index: grad.clone()}))
            layer.weight.register_post_accumulate_grad_hook(lambda w, index=index: after.update({index: w.grad.clone()}))
        found = []
        for _ in range(2):  # the second backward accumulates
            x = input_for(comm.rank)
            y = recompute(chain, [x], [chain]) if again else chain(x)
            y.square().sum().backward()
            found.append([*(before[i] for i in range(3)), *(after[i] for i in range(3)), x.grad])
        assert torch.equal(found[1][3], 2 * found[0][3]) and found[0][3].any()
        return found

    for mine, want in zip(gradients(Overlap(1)), gradients(Overlap()), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, want, strict=True))


@pytest.mark.mpi(sizes=(4,))
def test_a_graph_may_be_gone_through_twice_and_in_part(comm, make_grid):
    grid = make_grid(check=False, **GRID)
    plain, chain = (Chain(scheme("cuboid", grid, overlap=overlap)) for overlap in (Overlap(), Overlap(1)))
    want = torch.autograd.grad(plain(input_for(comm.rank)).square().sum(), list(plain.parameters()))
    for again in (False, True):
        x = input_for(comm.rank)
        y = (recompute(chain, [x], [chain]) if again else chain(x)).square().sum()
        for _ in range(2):
            (only_x,) = torch.autograd.grad(y, [x], retain_graph=True)
            only_weights = torch.autograd.grad(y, list(chain.parameters()), retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(only_weights, want, strict=True)), again
        y.backward(retain_graph=True)
        y.backward()
        assert torch.equal(x.grad, 2 * only_x), again
        assert all(torch.equal(p.grad, 2 * grad) for p, grad in zip(chain.parameters(), want, strict=True)), again
        chain.zero_grad(set_to_none=True)


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_a_weight_that_is_used_twice_has_the_sum_of_both_gradients(comm, make_grid, again):
    def gradients(overlap: Overlap) -> list[Tensor]:
        chain = Chain(scheme("cuboid", make_grid(check=False, **GRID), overlap=overlap), (8, 8, 8, 8))
        chain.turns = [0, 1, 2, 1, 2, 1]
        x = input_for(comm.rank)
        for _ in range(2):
            (recompute(chain, [x], [chain]) if again else chain(x)).square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in chain.parameters())]

    for found, want in zip(gradients(Overlap(2)), gradients(Overlap()), strict=True):
        assert (found - want).norm() <= 1e-14 * want.norm() > 0


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("node_memory", [True, False], ids=["node", "mpi"])
def test_another_order_is_noticed_and_learnt(comm, make_grid, node_memory):
    grid = make_grid(check=False, node_memory=node_memory, **GRID)
    plain, chain = (Chain(scheme("cuboid", grid, overlap=overlap), (8,) * 5) for overlap in (Overlap(), Overlap(gather=2)))
    extra = []
    for turns in [(0, 1, 2, 3)] * 2 + [(0, 3, 2, 1)] * 3 + [(0, 3)] * 2:
        outcomes, words = [], []
        for module in (plain, chain):
            module.turns, x = list(turns), input_for(comm.rank)
            module.zero_grad(set_to_none=True)
            with grid.ledger.watch() as moved:
                y = module(x)
                y.square().sum().backward()
            outcomes.append([y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)])
            words.append(moved.words)
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True)), turns
        extra.append(words[1] - words[0])
    assert [more > 0 for more in extra] == [False, False, True, False, False, True, False]


@pytest.mark.mpi(sizes=(4,))
def test_what_runs_outside_a_followed_forward_is_in_no_order(comm, make_grid):
    """Layers called by themselves after a backward, without gradients, gather neither ahead nor for the next backward."""
    grid = make_grid(check=False, **GRID)
    plain, chain = (Chain(scheme("cuboid", grid, overlap=overlap)) for overlap in (Overlap(), Overlap(2)))
    for turn in range(4):
        words = []
        for module in (plain, chain):
            x = input_for(comm.rank)
            with grid.ledger.watch() as moved:
                module(x).square().sum().backward()
                with torch.no_grad():
                    for layer in module.layers if turn == 1 else ():
                        x = layer(x)
            words.append(moved.words)
        assert words[0] == words[1] > 0


@pytest.mark.mpi(sizes=(4,))
def test_weights_that_change_between_passes_are_gathered_anew(comm, make_grid):
    grid = make_grid(check=False, **GRID)
    chain = Chain(scheme("cuboid", grid, overlap=Overlap(2)))
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            for parameter in chain.parameters():
                parameter.fill_(value)
        ones = torch.ones(4, 3, WIDTHS[0], dtype=torch.float64)
        assert (chain(ones) == value**3 * WIDTHS[0] * WIDTHS[1] * WIDTHS[2]).all()


@pytest.mark.mpi(sizes=(4,))
def test_a_weight_that_changes_while_it_is_gathered_ahead_is_gathered_anew(comm, make_grid):
    chain = Chain(scheme("cuboid", make_grid(check=False, **GRID), overlap=Overlap(2)))
    first, second, last = chain.layers

    @torch.no_grad()
    def change(*_: Any) -> None:
        last.weight.fill_(value)

    second.register_forward_hook(change)
    with torch.no_grad():
        for layer in (first, second):
            layer.weight.fill_(1.0)
    for value in (2.0, 3.0, 4.0):
        ones = torch.ones(4, 3, WIDTHS[0], dtype=torch.float64)
        assert (chain(ones) == value * WIDTHS[0] * WIDTHS[1] * WIDTHS[2]).all()


@pytest.mark.mpi(sizes=(4,))
def test_gathered_operands_that_backward_keeps_outlive_later_gathers(comm, make_grid):
    grid, found = make_grid(check=False, node_memory=True, **GRID), []
    for regather in (True, False):
        chain, x = Chain(scheme("cuboid", grid, regather, overlap=Overlap())), input_for(comm.rank)
        chain(x).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in chain.parameters())])
    assert all(torch.equal(kept, again) for again, kept in zip(*found, strict=True))
