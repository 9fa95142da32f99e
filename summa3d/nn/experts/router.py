"""The router of a mixture of experts: which experts a token goes to, and with which weights, alike on every grid."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...autograd.collectives import conjugate, sum_gradient
from ...comm.axis import Axis
from ...layout.layout import Layout, split_sizes
from ..config import ModelConfig
from ..context import Context
from ..parameter import ShardedModule, new_parameter


class Routing(NamedTuple):
    """The experts of t tokens, in the order in which this rank stores them.

    logits : [t, E], float32 or wider. scores : [t, E], each token's with the sum 1. choices : [t, k], the experts, best first.
    weights : [t, k], with gradient
    """

    logits: Tensor
    scores: Tensor
    choices: Tensor
    weights: Tensor


class TokenProduct(ShardedModule):
    """X·W of few columns, whole and bit for bit alike on all ranks that hold parts of a token.

    W [h, columns] is split along h as the residual stream is, and copied elsewhere. Each rank multiplies the part of h that it
    has; the sums are taken in float32 or wider, each of them by one rank that sends it to the others.

    Words: an all-reduce of `columns` words a token over the axes that split h, forward; one of W's block over the axes that split
    rows, backward.
    """

    def __init__(self, config: ModelConfig, scheme: Context, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.context, self.shape = scheme, (config.hidden, columns)
        self.layout = Layout(scheme.residual.dims[-1], ())
        self.rows, self.columns = scheme.rows(scheme.residual), scheme.columns(scheme.residual)
        self.weight = new_parameter(scheme, self.layout, self.shape, ("normal", 0.02), dtype, decay=True)

    def product(self, x: Tensor) -> Tensor:
        """X·W of this rank's block of the residual stream, [..., h/Z] → [..., columns]."""
        weight = sum_gradient(self.context.gathered(self.weight, self.layout, self.shape), self.rows)
        wide = torch.promote_types(x.dtype, torch.float32)
        return summed_once(x.to(wide) @ weight.to(wide), self.columns)


class Router(TokenProduct):
    """Softmax over X·W of E experts, or sigmoid, and the k best of each token: ties go to the lower expert.

    All ranks that hold parts of a token decide alike, bit by bit. The k weights are divided by their sum if the family does so.
    The choice alone is by scores with the bias added, where there is one, and among the experts of the best groups, which are
    those with the largest sums of their two best scores; ties go to the lower group. The bias [E] has no gradient: `ExpertLoads`
    moves it. Layers that compute in 16 bits read it rounded.

    Words: those of `TokenProduct` of E columns, and an all-reduce of k words a token over the axes that split h, backward.
    Source of bias and groups: DeepSeek-AI 2024 (V3), §2.1.2.
    """

    def __init__(self, config: ModelConfig, scheme: Context, dtype: torch.dtype) -> None:
        super().__init__(config, scheme, config.num_experts, dtype)
        self.chosen, self.renormalised = config.num_chosen, config.renormalised
        self.by_sigmoid, self.groups = config.moe.scored_by == "sigmoid", config.moe.competing
        self.bias = None
        if config.moe.bias_rate is not None:
            self.bias = new_parameter(scheme, BIAS, self.shape[1:], ("constant", 0.0), dtype, decay=False)
            self.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of this rank's block of the residual stream, [t, h/Z]."""
        logits = self.product(x)
        scores = logits.sigmoid() if self.by_sigmoid else logits.softmax(-1)
        choices = _best(self._competing(scores.detach()), self.chosen)
        weights = scores.gather(1, choices)
        if self.renormalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.by_sigmoid:
            scores = scores / scores.sum(-1, keepdim=True)
        return Routing(logits, scores, choices, sum_gradient(weights, self.columns))  # whose gradients are sums over h

    def _competing(self, scores: Tensor) -> Tensor:
        """By what the experts of each token are chosen: −∞ for those of other groups than its best."""
        if self.bias is not None:
            scores = scores + self.context.gathered(self.bias, BIAS, self.shape[1:]).to(scores.dtype)
        groups, of_token = self.groups
        if of_token == groups:
            return scores
        grouped = scores.unflatten(-1, (groups, -1))  # [t, groups, E/groups]
        together = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1)
        excluded = torch.ones_like(together, dtype=torch.bool).scatter_(1, _best(together, of_token), value=False)
        return grouped.masked_fill(excluded[..., None], -torch.inf).flatten(1)

    def extra_repr(self) -> str:
        """The sizes that torch prints for the module."""
        return f"{self.shape[0]} → {self.chosen} of {self.shape[1]}, {self.layout}"


BIAS = Layout(())
"""The layout of the bias of the choice: copies."""


def _best(scores: Tensor, many: int) -> Tensor:
    """The columns of the largest elements of each row, the largest first: ties go to the lower column."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :many]


class Gate(TokenProduct):
    """The sigmoid of X·w: with which weight each token takes the expert that all tokens go to.

    Words: those of `TokenProduct` of a column, and an all-reduce of a word a token over the axes that split h, backward.
    """

    def __init__(self, config: ModelConfig, scheme: Context, dtype: torch.dtype) -> None:
        super().__init__(config, scheme, 1, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The weights of the tokens of this rank's block of the residual stream, [b/(XY), s, 1], in its dtype."""
        return sum_gradient(self.product(x).sigmoid().to(x.dtype), self.columns)


def summed_once(partial: Tensor, axis: Axis) -> Tensor:
    """All-reduce `partial` along `axis` so that all members have the same bits; backward is the identity.

    Each number is added by one member, in the members' order, and sent to the others: an MPI's all-reduce need not do so. The
    words are those of an all-reduce.
    """
    if axis.size == 1:
        return partial

    def run(block: Tensor) -> Tensor:
        flat = block.detach().reshape(-1)
        sizes = split_sizes(flat.numel(), axis.size)
        whole: Tensor = axis.all_gather(axis.reduce_scatter(flat, 0, sizes), 0, sizes)
        return whole.view_as(block)

    return conjugate(partial, run, lambda grad: grad.view_as(grad))
