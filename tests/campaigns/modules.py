"""Hostile modules and plans: each is refused by name, right in its output and all gradients, or caught by the probe.

`python tests/campaigns modules --cases 200 --ranks 4 --seed 1`. A case is a small module of one to three blocks, right but for
one or two habits: of its code on the residual stream or between two linear layers, of how it is made, or of its plan. It is
adopted with the probe, and then compared with itself unsplit on another batch.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import adopted
import torch
from campaigns import core
from campaigns.core import RankCase, World, blame
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from summa3d import Grid
from summa3d.errors import Summa3dError
from summa3d.layout import collect
from summa3d.nn import parallelise, scheme

PROBE = "the probe"
CLOSE, FLOOR = 1e-9, 1e-4
"""Relative; a gradient is large from this part of the largest on: some are 0 but for rounding."""
VOCABULARY = 23
GRIDS = {
    2: (("oned", {"y": 2}), ("cuboid", {"x": 2}), ("cuboid", {"z": 2})),
    3: (("oned", {"y": 3}), ("cuboid", {"x": 3}), ("cuboid", {"z": 3})),
    4: (
        ("oned", {"y": 4}),
        ("summa", {"x": 2, "y": 2}),
        ("tesseract", {"d": 4}),
        ("cuboid", {"y": 2, "z": 2}),
        ("cuboid", {"x": 2, "z": 2}),
    ),
    6: (("cuboid", {"x": 3, "y": 2}), ("cuboid", {"y": 3, "z": 2}), ("summa", {"x": 2, "y": 3})),
}
Change = Callable[["Net", Tensor], Tensor]
"""What code does to the stream, or between two linears."""


def _itself(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    """A branch of the residual stream."""

    def __init__(self, h: int, f: int, bias: bool, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(h) if norm else nn.RMSNorm(h, eps=1e-5)
        self.up, self.down = nn.Linear(h, f, bias=bias), nn.Linear(f, h, bias=bias)

    def forward(self, x: Tensor, net: Net) -> Tensor:
        return self.down(net.within(self.up(net.around(self.norm(x))).tanh()))


class Attending(Block):
    """A block whose first layer makes queries of heads of `size`, of which several share one of `groups` of k and v."""

    size: int
    groups: int
    kind: str

    def forward(self, x: Tensor, net: Net) -> Tensor:
        x = net.around(self.norm(x))
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.up, self.k, self.v))
        if self.kind == "by turns":
            k, v = (part.repeat(1, q.shape[1] // part.shape[1], 1, 1) for part in (k, v))
        if self.kind == "summed":
            k = k + k.sum(1, keepdim=True)
        if self.kind == "by its count":
            k, v = (part.repeat_interleave(net.sizes["f"] // (self.groups * self.size), 1) for part in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.down(net.within(out.transpose(1, 2).flatten(2)))


class Net(nn.Module):
    """Blocks on a stream of embedded ids or of rows, in the order of `order`; with a head, where it embeds."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        h, f = sizes["h"], sizes["f"]
        self.sizes, self.order = sizes, list(range(sizes["blocks"]))
        self.on_stream, self.between = list[Change](), list[Change]()
        self.returns: Callable[[Tensor], Any] = _itself
        if sizes["ids"]:
            self.tokens = nn.Embedding(VOCABULARY, h)
        self.blocks = nn.ModuleList(Block(h, f, sizes["bias"], sizes["norm"]) for _ in self.order)
        if sizes["ids"]:
            self.head = nn.Linear(h, VOCABULARY, bias=False)

    def around(self, x: Tensor) -> Tensor:
        self.width = self.sizes["h"]
        for change in self.on_stream:
            x = change(self, x)
        return x

    def within(self, x: Tensor) -> Tensor:
        self.width = self.sizes["f"]
        for change in self.between:
            x = change(self, x)
        return x

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Any:
        x = self.tokens(x) if self.sizes["ids"] else x
        for place in self.order:
            branch = self.blocks[place](x, self)
            x = x + (branch if gain is None else gain * branch)
        return self.returns(self.head(x) if self.sizes["ids"] else x)


# ---------------------------------------------------------------------------------------------------------- habits of code

ANYWHERE: dict[str, Change] = {
    "softmax of the last dim": lambda net, x: x.softmax(-1),
    "softmax of rows": lambda net, x: x.softmax(0),
    "softmax of the sequence": lambda net, x: x.softmax(1),
    "log_softmax by torch's function": lambda net, x: torch.log_softmax(x, 2),
    "mean of the last dim": lambda net, x: x - x.mean(-1, keepdim=True),
    "mean of rows": lambda net, x: x - x.mean(0, keepdim=True),
    "mean of the sequence": lambda net, x: x - x.mean(1, keepdim=True),
    "mean of all": lambda net, x: x - x.mean(),
    "norm of all": lambda net, x: x / (1 + x.norm()),
    "std of the last dim": lambda net, x: x / (1 + x.std(-1, keepdim=True)),
    "layer_norm by its function": lambda net, x: functional.layer_norm(x, x.shape[-1:]),
    "normalize": lambda net, x: functional.normalize(x, dim=-1),
    "largest of the last dim": lambda net, x: x - x.max(-1, keepdim=True).values,
    "largest of all": lambda net, x: x / (1 + x.detach().abs().max()),
    "cumsum of the last dim": lambda net, x: x.cumsum(-1),
    "cumsum of rows": lambda net, x: x.cumsum(0),
    "cumsum of the sequence": lambda net, x: x.cumsum(1),
    "logcumsumexp of the last dim": lambda net, x: x.logcumsumexp(-1),
    "prod of the last dim": lambda net, x: x + x.prod(-1, keepdim=True),
    "sorted": lambda net, x: x.sort(-1).values,
    "sorted rows": lambda net, x: x.sort(0).values,
    "flipped": lambda net, x: x.flip(-1),
    "flipped rows": lambda net, x: x.flip(0),
    "flipped sequence": lambda net, x: x.flip(1),
    "rolled": lambda net, x: x.roll(1, -1),
    "rolled rows": lambda net, x: x.roll(1, 0),
    "first column": lambda net, x: x + x[..., :1],
    "first row": lambda net, x: x + x[:1],
    "first token": lambda net, x: x + x[:, :1],
    "a column is zeroed in place": lambda net, x: _with(x, lambda y: y[..., 0].zero_()),
    "a row is zeroed in place": lambda net, x: _with(x, lambda y: y[0].zero_()),
    "scaled in place": lambda net, x: x.clone().mul_(0.5),
    "clamped in place": lambda net, x: x.clone().clamp_(-0.5, 0.5),
    "its width is read": lambda net, x: x / x.shape[-1] ** 0.5,
    "its rows are read": lambda net, x: x / len(x),
    "its length is read": lambda net, x: x / x.shape[1],
    "its elements are counted": lambda net, x: x * (100 / x.numel()),
    "ones of its shape": lambda net, x: x + torch.ones_like(x),
    "columns are numbered": lambda net, x: x * torch.arange(x.shape[-1], device=x.device, dtype=x.dtype),
    "rows are numbered": lambda net, x: x + torch.arange(len(x), device=x.device, dtype=x.dtype)[:, None, None],
    "tokens are numbered": lambda net, x: x + torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None] / 9,
    "dropout": lambda net, x: functional.dropout(x, 0.3, True),
    "dropout of 0": lambda net, x: functional.dropout(x, 0.0, True),
    "noise": lambda net, x: x + torch.rand_like(x),
    "rows are mixed": lambda net, x: torch.einsum("bsh,csh->csh", x, x),
    "rows are mixed by @": lambda net, x: (x.transpose(0, 1) @ x.transpose(0, 1).mT @ x.transpose(0, 1)).transpose(0, 1),
    "tokens are mixed": lambda net, x: x.transpose(1, 2).softmax(-1).transpose(1, 2),
    "scores of the last dim": lambda net, x: (x @ x.mT).softmax(-1) @ x,
    "decided by a value": lambda net, x: x * 2 if x.sum() > 0 else -x,
    "decided by an item": lambda net, x: x * 2 if x.max().item() > 0.5 else -x,
    "decided by the width": lambda net, x: x if x.shape[-1] % 2 else -x,
    "a value is counted": lambda net, x: x / (1 + (x > 0).sum()),
    "where of itself": lambda net, x: torch.where(x > 0, x, 0.1 * x),
    "masked by a value": lambda net, x: x.masked_fill(x < -0.3, 0.0),
    "indexed by a mask": lambda net, x: _with(x, lambda y: y.__setitem__(y < 0, 0.0)),
    "nonzero": lambda net, x: x * x.nonzero().shape[0],
    "halves of the last dim": lambda net, x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "halves of rows": lambda net, x: torch.cat(x.chunk(2, 0)[::-1], 0),
    "rotated halves": lambda net, x: torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1),
    "padded": lambda net, x: functional.pad(x, (1, 0))[..., :-1],
    "one row and another": lambda net, x: x.index_select(0, torch.arange(len(x), device=x.device).flip(0)),
    "a float of a tensor": lambda net, x: x * float(x.detach().mean()),
    "a parameter made in forward": lambda net, x: x * nn.Parameter(torch.ones(1, dtype=x.dtype, device=x.device)),
    "a whole parameter made in forward": lambda net, x: (
        x * nn.Parameter(torch.linspace(0, 1, net.width, dtype=x.dtype, device=x.device))
    ),
    "detached": lambda net, x: x.detach() + x,
    "no gradient": lambda net, x: x + _without_gradient(x),
    "checkpointed": lambda net, x: checkpoint(torch.sin, x, use_reentrant=False),
    "double": lambda net, x: x.double().sin().to(x.dtype),
    "half": lambda net, x: x.float().sin().to(x.dtype),
    "as strided": lambda net, x: x.contiguous().as_strided(x.shape, x.contiguous().stride()).sin(),
    "flat and back": lambda net, x: x.reshape(-1, x.shape[-1]).sin().view(x.shape),
    "one long row": lambda net, x: x.flatten().softmax(0).view(x.shape),
    "turned": lambda net, x: x.transpose(0, 1).contiguous().sin().transpose(0, 1),
    "an ordinary function": lambda net, x: functional.gelu(x) * torch.sigmoid(x),
    "a step of its own": lambda net, x: Sine.apply(x),
}
BETWEEN: dict[str, Change] = {
    "a view by the whole width": lambda net, x: x.view(*x.shape[:-1], 2, net.sizes["f"] // 2).sin().flatten(-2),
    "a reshape by the whole width": lambda net, x: x.reshape(len(x), -1, net.sizes["f"]).sin(),
    "a view by pairs": lambda net, x: x.unflatten(-1, (-1, 2)).sin().flatten(-2),
    "a softmax of pairs": lambda net, x: x.unflatten(-1, (-1, 2)).softmax(-1).flatten(-2),
    "pairs are turned": lambda net, x: x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2),
    "a softmax over pairs": lambda net, x: x.unflatten(-1, (-1, 2)).softmax(-2).flatten(-2),
    "attention of pairs": lambda net, x: _attention(x.unflatten(-1, (-1, 2))),
    "attention of pairs, with dropout": lambda net, x: _attention(x.unflatten(-1, (-1, 2)), 0.2),
    "attention between heads": lambda net, x: _attention(x.unflatten(-1, (-1, 2)).transpose(1, 2)).transpose(1, 2),
    "gated by halves": lambda net, x: torch.cat([x.chunk(2, -1)[0] * x.chunk(2, -1)[1]] * 2, -1),
    "normed as heads": lambda net, x: functional.rms_norm(x.unflatten(-1, (-1, 2)), (2,)).flatten(-2),
}


class Sine(torch.autograd.Function):
    """A step with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


def _with(x: Tensor, act: Callable[[Tensor], Any]) -> Tensor:
    act(y := x.clone())
    return y


def _without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.sin()


def _attention(x: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal attention of [b, s, heads, d] with itself, [b, s, heads·d]."""
    q = x.transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q, q, dropout_p=dropout, is_causal=True).transpose(1, 2).flatten(2)


# ------------------------------------------------------------------------------------------- habits of a module, and of its plan

Habit = Callable[[Net, dict[str, str], random.Random], object]


def _places(net: Net, chance: random.Random) -> list[Change]:
    return chance.choice([net.on_stream, net.between])


def _parameter(net: Net, chance: random.Random, *shape: int) -> None:
    net.own = nn.Parameter(
        torch.linspace(0.5, 1.5, shape[0]).to(torch.float64) if shape else torch.tensor(1.5, dtype=torch.float64)
    )
    _places(net, chance).append(lambda net, x: x * net.own)


def _buffer(net: Net, chance: random.Random, width: str) -> None:
    net.register_buffer("whole", torch.linspace(0.5, 1.5, net.sizes[width], dtype=torch.float64))
    (net.on_stream if width == "h" else net.between).append(lambda net, x: x * net.whole)


def _layer(net: Net, places: list[Change], layer: nn.Module) -> None:
    net.extra = layer.double()
    places.append(lambda net, x: net.extra(x))


def _counted(net: Net) -> None:
    net.register_buffer("count", torch.zeros(()))
    net.on_stream.append(lambda net, x: _with(x, lambda y: net.count.add_(1)))


def _of_all(net: Net, chance: random.Random, read: Callable[[Block], Tensor]) -> None:
    net.on_stream.append(lambda net, x: x + read(net.blocks[0]))


def _grouped(net: Net, plan: dict[str, str], chance: random.Random, kind: str) -> None:
    h, f, groups = net.sizes["h"], net.sizes["f"], chance.choice([1, 2])
    size = 4 if f % 8 == 0 else 2
    for block in net.blocks:
        block.__class__, block.size, block.groups, block.kind = Attending, size, groups, kind
        block.k, block.v = (nn.Linear(h, groups * size, bias=net.sizes["bias"]).double() for _ in "kv")
    plan.update({"k": "first", "v": "first"})


def _twice(block: Block) -> None:
    block.up.forward = lambda x: 2 * functional.linear(x, block.up.weight, block.up.bias)  # type: ignore[method-assign]


def _swap(plan: dict[str, str], name: str) -> None:
    plan |= {f"{name}up": "second", f"{name}down": "first"}


class Doubled(nn.Linear):
    """A linear layer of another kind."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _replace(net: Net) -> None:
    old = net.blocks[0].up
    net.blocks[0].up = Doubled(old.in_features, old.out_features, bias=old.bias is not None).double()


def _tie(net: Net, name: str) -> None:
    first, last = (net.blocks[place].get_submodule(name) for place in (0, -1))
    last.weight = first.weight


HABITS: dict[str, Habit] = {
    "a pattern without a match": lambda net, plan, _: plan.update({"fc9": "first"}),
    "a word that is unknown": lambda net, plan, _: plan.update({"up": "third"}),
    "words swapped": lambda net, plan, _: _swap(plan, ""),
    "words swapped in a block": lambda net, plan, _: _swap(plan, "blocks.0."),
    "all first": lambda net, plan, _: plan.update({"down": "first"}),
    "all second": lambda net, plan, _: plan.update({"up": "second"}),
    "a linear layer left out": lambda net, plan, _: plan.pop("down"),
    "an up left out": lambda net, plan, _: plan.pop("up"),
    "no plan at all": lambda net, plan, _: plan.clear(),
    **{
        f"grouped attention{kind and ', ' + kind}": lambda net, plan, chance, kind=kind: _grouped(net, plan, chance, kind)
        for kind in ("", "by turns", "summed", "by its count")
    },
    "a norm with a word": lambda net, plan, _: plan.update({"norm": "first"}),
    "all modules with a word": lambda net, plan, _: plan.update({"*": "first"}),
    "blocks with a word": lambda net, plan, _: plan.update({"blocks.*": "first"}),
    "Transformers' words": lambda net, plan, _: plan.update({"up": "colwise", "down": "rowwise"}),
    "kept": lambda net, plan, _: plan.update({"up": "replicate", "down": "replicate"}),
    "named one by one": lambda net, plan, _: plan.update({f"blocks.{n}.up": "first" for n in range(len(net.blocks))}),
    "a second head": lambda net, plan, _: plan.update({"head": "second"}) if net.sizes["ids"] else plan.update({"x": "second"}),
    "a block at two places": lambda net, plan, _: (net.blocks.append(net.blocks[0]), net.order.append(len(net.order))),
    "a block called twice": lambda net, plan, _: net.order.append(0),
    "all blocks called twice": lambda net, plan, _: net.order.extend(net.order),
    "another order": lambda net, plan, _: net.order.reverse(),
    "a block that is not called": lambda net, plan, _: net.order.pop(),
    "tied ups": lambda net, plan, _: _tie(net, "up"),
    "tied norms": lambda net, plan, _: _tie(net, "norm"),
    "a norm at two places": lambda net, plan, _: setattr(net.blocks[-1], "norm", net.blocks[0].norm),
    "a tied head": lambda net, plan, _: setattr(net.head, "weight", net.tokens.weight) if net.sizes["ids"] else None,
    "a frozen layer": lambda net, plan, _: net.blocks[0].up.requires_grad_(False),
    "a frozen norm": lambda net, plan, _: net.blocks[0].norm.requires_grad_(False),
    "all frozen but one": lambda net, plan, _: (net.requires_grad_(False), net.blocks[0].down.requires_grad_(True)),
    "all frozen": lambda net, plan, _: net.requires_grad_(False),
    "a buffer of the hidden size": lambda net, plan, chance: _buffer(net, chance, "h"),
    "a buffer of the inner size": lambda net, plan, chance: _buffer(net, chance, "f"),
    "a parameter of the hidden size": lambda net, plan, chance: _parameter(net, chance, net.sizes["h"]),
    "a parameter of one": lambda net, plan, chance: _parameter(net, chance, 1),
    "a scalar parameter": lambda net, plan, chance: _parameter(net, chance),
    "a counter": lambda net, plan, _: _counted(net),
    "a Dropout": lambda net, plan, chance: _layer(net, _places(net, chance), nn.Dropout(0.2)),
    "a Dropout of 0": lambda net, plan, chance: _layer(net, _places(net, chance), nn.Dropout(0.0)),
    "a norm between": lambda net, plan, _: _layer(net, net.between, nn.LayerNorm(net.sizes["f"])),
    "a norm of the stream": lambda net, plan, _: _layer(net, net.on_stream, nn.LayerNorm(net.sizes["h"])),
    "a norm without vectors": lambda net, plan, _: _layer(
        net, net.on_stream, nn.LayerNorm(net.sizes["h"], elementwise_affine=False)
    ),
    "a norm of two dims": lambda net, plan, _: _layer(net, net.on_stream, nn.LayerNorm((5, net.sizes["h"]))),
    "a batch norm": lambda net, plan, _: _layer(net, net.on_stream, nn.BatchNorm1d(5)),
    "a group norm": lambda net, plan, _: _layer(net, net.on_stream, nn.GroupNorm(1, 5)),
    "a softmax": lambda net, plan, chance: _layer(net, _places(net, chance), nn.Softmax(-1)),
    "an activation with a parameter": lambda net, plan, chance: _layer(net, _places(net, chance), nn.PReLU()),
    "a convolution": lambda net, plan, _: _layer(net, net.on_stream, nn.Conv1d(5, 5, 1)),
    "a recurrence": lambda net, plan, _: net.between.append(lambda net, x: torch.stack([*_steps(x)], 1)),
    "a layer of two inputs": lambda net, plan, _: _layer(net, net.on_stream, nn.Linear(net.sizes["h"], net.sizes["h"])),
    "a normed weight": lambda net, plan, _: nn.utils.parametrizations.weight_norm(net.blocks[0].up),
    "a linear layer of another kind": lambda net, plan, _: _replace(net),
    "a weight read": lambda net, plan, chance: _of_all(net, chance, lambda block: block.up.weight.sum() / 99),
    "a bias read": lambda net, plan, chance: _of_all(net, chance, lambda block: block.norm.weight),
    "a weight used by itself": lambda net, plan, chance: net.on_stream.append(
        lambda net, x: functional.linear(functional.linear(x, net.blocks[0].up.weight), net.blocks[0].down.weight)
    ),
    "a weight multiplied with": lambda net, plan, chance: net.on_stream.append(lambda net, x: x @ net.blocks[0].up.weight.T),
    "a hook": lambda net, plan, _: net.blocks[0].up.register_forward_hook(lambda module, given, out: 2 * out),
    "a hook before": lambda net, plan, _: net.blocks[0].down.register_forward_pre_hook(lambda module, given: (2 * given[0],)),
    "a hook of a block": lambda net, plan, _: net.blocks[0].register_forward_hook(lambda module, given, out: 2 * out),
    "a hook of a gradient": lambda net, plan, _: net.blocks[0].up.weight.register_hook(lambda gradient: 2 * gradient),
    "a forward of its own": lambda net, plan, _: _twice(net.blocks[0]),
    "in evaluation": lambda net, plan, _: net.eval(),
    "returns a tuple": lambda net, plan, _: setattr(net, "returns", lambda x: (x, x)),
    "returns a table": lambda net, plan, _: setattr(net, "returns", lambda x: {"out": x}),
    "returns a loss": lambda net, plan, _: setattr(net, "returns", lambda x: x.square().mean()),
    "returns sums": lambda net, plan, _: setattr(net, "returns", lambda x: x.sum(1)),
    "returns a row": lambda net, plan, _: setattr(net, "returns", lambda x: x[0]),
    "returns the last token": lambda net, plan, _: setattr(net, "returns", lambda x: x[:, -1]),
    "returns nothing": lambda net, plan, _: setattr(net, "returns", lambda x: None),
    "raises": lambda net, plan, _: net.on_stream.append(lambda net, x: x / [] if len(x) else x),
}


def _steps(x: Tensor) -> list[Tensor]:
    found = [x[:, 0]]
    for place in range(1, x.shape[1]):
        found.append((found[-1] + x[:, place]).tanh())
    return found


GAINS: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    "a gain of each token": lambda b, s, h: (b, s, 1),
    "a gain of each row": lambda b, s, h: (b, 1, 1),
    "a gain of all": lambda b, s, h: (b, s, h),
    "a gain of each column": lambda b, s, h: (1, 1, h),
    "a gain of the sequence": lambda b, s, h: (s, 1),
    "a gain of one": lambda b, s, h: (),
}
"""A second input, given by keyword."""
MUST_RUN = {
    "ones of its shape", "scaled in place", "clamped in place", "an ordinary function", "where of itself", "flipped sequence",
    "a block called twice", "all blocks called twice", "another order", "a scalar parameter", "a Dropout of 0", "a frozen layer",
    "a norm between", "a norm of the stream", "Transformers' words", "in evaluation", "a gain of each token", "a gain of all",
    "a gain of one", "softmax of the sequence", "tokens are numbered", "detached", "as it should be",
}  # fmt: skip


@dataclass
class ModuleCase(RankCase):
    """A module with habits, in a scheme."""

    grid: tuple[str, dict[str, int]]
    habits: Sequence[str]
    sizes: dict[str, Any]
    seed: int

    def run(self, world: World, number: int) -> tuple[str, str]:
        """Adopt it, and compare it with itself unsplit; a finding unless all ranks end alike."""
        own = world.comm.Dup()
        grid = Grid(own, self.grid[1])
        try:
            found = self._tried(grid)
        finally:
            with contextlib.suppress(Summa3dError):
                grid.free()
            own.Free()
        every = world.control.allgather(found[0])
        world.board.meet(number)
        return found if len(set(every)) == 1 else (f"ranks differ: {every}", found[1])

    def _tried(self, grid: Any) -> tuple[str, str]:
        try:
            with adopted.Wide():
                error = self._error(grid)
        except Summa3dError as refusal:
            if MUST_RUN.issuperset(self.habits):
                return "refused, though it is right", str(refusal)
            return "caught" if str(refusal).startswith(PROBE) else "refused", str(refusal)
        except Exception as other:
            return blame(other), str(other)[:400]
        return ("right", "") if error <= CLOSE else (f"wrong: {error:.1e}", "")

    def made(self) -> tuple[Net, dict[str, str]]:
        """The module and its plan, alike each time."""
        torch.manual_seed(self.seed)
        net, chance = Net(self.sizes).double(), random.Random(self.seed)
        plan = {"up": "first", "down": "second", **({"head": "first"} if self.sizes["ids"] else {})}
        for habit in self.habits:
            if habit in HABITS:
                HABITS[habit](net, plan, chance)
            elif habit in BETWEEN or (habit in ANYWHERE and chance.random() < 0.5):
                net.between.append({**ANYWHERE, **BETWEEN}[habit])
            elif habit in ANYWHERE:
                net.on_stream.append(ANYWHERE[habit])
        return net, plan

    def inputs(self, rows: int) -> dict[str, Tensor]:
        """A global batch of rows of five tokens."""
        generator = torch.Generator().manual_seed(self.seed + rows)
        shape = rows, 5, self.sizes["h"]
        if self.sizes["ids"]:
            found = {"x": torch.randint(0, VOCABULARY, shape[:2], generator=generator)}
        else:
            found = {"x": torch.randn(shape, generator=generator, dtype=torch.float64)}
        for habit in self.habits:
            if habit in GAINS:
                found["gain"] = torch.randn(GAINS[habit](*shape), generator=generator, dtype=torch.float64)
        return found

    def _error(self, grid: Any) -> float:
        """The largest relative difference of the output and of each gradient on a batch that the probe has not seen."""
        context = scheme(self.grid[0], grid)
        (net, _), (module, plan), inputs = self.made(), self.made(), self.inputs(24)
        adopted_one: Any = parallelise(module, context, plan, self.inputs(12) if "gain" in inputs else None)
        wanted = net(**inputs)
        torch.manual_seed(1)
        upstream = torch.randn_like(wanted)
        layout = context.scheme.after_linear(context.residual) if self.sizes["ids"] else context.residual
        found = adopted_one(**inputs)
        whole = collect(found.detach().contiguous(), grid, layout, tuple(wanted.shape))
        error = ((whole - wanted).abs().max() / wanted.abs().max()).item()
        if wanted.requires_grad:
            wanted.backward(upstream)
            found.backward(upstream[layout.slices(upstream.shape, grid.shape, grid.coordinates)].contiguous())
            gradients = {name: p.grad for name, p in net.named_parameters()}
            largest = max(float(one.abs().max()) for one in gradients.values() if one is not None)
            error = max(error, *adopted.differences(adopted_one, gradients, FLOOR * largest).values())
        return error


def hostile(chance: random.Random, rank: int, size: int) -> ModuleCase:
    """A module with one habit or two."""
    names = [*ANYWHERE, *BETWEEN, *HABITS, *GAINS, "as it should be"]
    habits = chance.sample(names, chance.choice([1, 1, 2]))
    grid = chance.choice(GRIDS[size])
    sizes = {"h": chance.choice([12, 24, 14, 17]), "f": chance.choice([24, 48, 34, 10]), "blocks": chance.randint(1, 3)}
    sizes |= {name: chance.random() < 0.5 for name in ("ids", "bias", "norm")}
    about = f"{' · '.join(habits)}, {grid[0]} {grid[1]}, {sizes}"
    group = "habits" if len(habits) > 1 else "a habit"
    return ModuleCase(group, about, "node memory", None, grid, habits, sizes, chance.randrange(1 << 30))


KIND = core.Kind("modules", "hostile modules and plans", ((hostile, 1),))


def main() -> int:
    """Run the cases of the command line."""
    return core.main(KIND, __doc__)
