"""The layer of experts, which stands in the place of a block's feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...autograd.collectives import conjugate
from ...autograd.deferred import MicroBatchKey
from ...autograd.function import Function, once_differentiable
from ...comm.axis import Axis
from ...layout.layout import split_sizes
from ..config import ModelConfig
from ..context import Context
from ..layers.dropout import Batch
from ..layers.mlp import GatedMLP
from ..schemes.registry import row_axes
from .capacity import Capacity
from .dispatch import DispatchPlan, ExpertPlane, plan_dispatch
from .router import Gate, Router, Routing


class _Unused(Function):
    """Y, and zeros as the gradients of weights that nothing was multiplied with."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return grad, *(torch.zeros_like(weight) if needed else None for weight, needed in weights)


class MoE(nn.Module):
    """Y[t] = Σ w[t, e]·expert_e(X[t]) over the k experts that the router chooses for each token, of those that take it.

    All do, unless the model has a capacity (`Capacity`), which leaves the weights of the others as they are.

    Each expert is a `GatedMLP` on the inner grid of the ranks that hold it, whose rows lie as the scheme's `pooled` layout says:
    they are split evenly, however many tokens an expert has. Tokens travel along the axes that split rows, and axis ep.

    Words of a rank on a plane of g ranks, with counts as they come (`plan_dispatch`): (g−1)·E whole numbers; the rows that it
    receives, h/Z words each, out and back, forward and backward alike; and those of the router, of the capacity, and of the
    experts' products, which are of tiles (`MixtureConfig`) where the model has them. An expert without tokens computes nothing;
    its gradients are zeros. `counts` are the tokens that each expert took in the last forward, of all ranks of the plane, and
    `trained` those of every micro-batch of training since they were taken (`ExpertLoads`). In some families every token goes to
    one more expert, weighted by a gate of its own.
    Router losses, where the model has some, are added to the loss of training (`PassState.add_term`).
    """

    def __init__(self, config: ModelConfig, scheme: Context, out_std: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.context, self.config = scheme, config
        self.router = Router(config, scheme, dtype)
        rows = row_axes(scheme.residual)
        self.axis, self.plane = expert_axis(scheme), expert_plane(config, scheme)
        self.split_sequence = [place for place, axis in enumerate(rows) if axis in scheme.residual.dims[1]]
        self.group = self.axis.index // self.plane.parts
        sharded = tuple(axis for axis in scheme.sharded if axis != "ep")  # along which no other rank holds the same experts
        self.shared_weights = bool(sharded)
        unfetched = replace(scheme, prefetcher=None, sharded=sharded)  # a prefetch knows an order, which tokens change
        sizes, layout = (config.hidden, config.expert_width), scheme.scheme.pooled
        fused = (
            scheme.grid.size > 1 or self.shared_weights
        )  # else nothing is gathered, and a copy of weights is more than few rows
        homes = [unfetched.on(ep=(home,)) for home in self.plane.homes]
        experts = [GatedMLP(*sizes, home, 0.02, out_std, dtype, layout=layout, fused=fused) for home in homes]
        for expert in experts:
            expert.compare_once()
        self.experts = nn.ModuleList(experts)
        shared = config.shared_width
        self.shared = GatedMLP(config.hidden, shared, scheme, 0.02, out_std, dtype) if shared else None
        self.shared_gate = Gate(config, scheme, dtype) if shared else None
        self.capacity = None if config.moe.capacity is None else Capacity(config, scheme, config.moe.capacity)
        self.load: Callable[[int], np.ndarray] | None = None
        self.counts = np.zeros(config.num_experts, np.int64)
        self.trained: dict[MicroBatchKey, np.ndarray] = {}

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """This rank's block of Y for its block of X, [b/(XY), s, h/Z] in the cuboid."""
        flat = x.flatten(0, -2)
        routing = self.router(flat)
        choices, own, everyone = self._counts(routing, batch)
        if self._has_terms:
            self._add_terms(routing, own, batch)
        self.counts = everyone.sum(0)
        if self.training:
            self.trained[self.context.state.key] = self.counts  # a forward that runs a second time is counted once
        plan = plan_dispatch(everyone, self.plane, self.axis.index)
        take = choices.flatten().argsort(stable=True)[torch.from_numpy(plan.take).to(x.device)]
        result = self._returned(self._experts_of(self._sent(flat, take, plan), plan), take, plan, len(flat))  # [t, k, h/Z]
        chosen = torch.bmm(routing.weights.to(x.dtype)[:, None], result).view_as(x)
        if self.shared is None or self.shared_gate is None:
            return chosen
        rows = self.context.scheme.rows(batch.rows, batch.sequence)
        return chosen + self.shared_gate(x) * self.shared(x, rows)

    @property
    def _has_terms(self) -> bool:
        return self.training and bool(self.config.balance_weight or self.config.z_weight)

    def _counts(self, routing: Routing, batch: Batch) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """The experts that take this rank's tokens, [t, k], E for one that does not; and how many tokens these are.

        Those that chose each expert, of each of this rank's sequences, whole, [b, E]; and that each takes, of each member of the
        plane. One message of whole numbers. The former are known where the loss asks for them; where ranks hold parts of a
        sequence, the message is of sequences, then; where contexts do, they are summed over these. A capacity knows them.
        """
        choices, experts, sequences = routing.choices, self.plane.experts, self._sequences(batch)
        if choices.is_meta:
            return choices, *self._balanced(routing, sequences)
        if self.capacity is not None:
            ordered = self.context.batch_first(choices.view(*self._stored(sequences, routing), -1))
            taken, chosen = self.capacity.taken(ordered, batch)
            choices = choices.masked_fill(~self.context.as_stored(taken).view_as(choices), experts)
            mine = torch.bincount(choices.flatten(), minlength=experts + 1)[:experts].cpu().numpy()
            return choices, chosen, self.axis.all_gather(mine[None]).reshape(self.plane.members, experts)
        return choices, *self._of_sequences(choices, sequences)

    def _of_sequences(self, choices: Tensor, sequences: int) -> tuple[np.ndarray, np.ndarray]:
        """The counts, where experts take all tokens."""
        experts = self.plane.experts
        parted = self._has_terms and bool(self.split_sequence)
        of_tokens = torch.arange(sequences, device=choices.device)[:, None].expand(sequences, len(choices) // sequences)
        numbers = choices + self.context.as_stored(of_tokens).flatten()[:, None] * experts
        mine = torch.bincount(numbers.flatten(), minlength=sequences * experts).cpu().numpy().reshape(sequences, experts)
        message = mine if parted else mine.sum(0, keepdims=True)
        gathered = self.axis.all_gather(message).reshape(self.plane.members, len(message), experts)
        if parted:
            sizes = self.plane.splits
            places = np.unravel_index(self.axis.index % self.plane.parts, sizes)
            at = [slice(None) if place in self.split_sequence else int(index) for place, index in enumerate(places)]
            parts = gathered.reshape(self.plane.groups, *sizes, sequences, experts)[self.group][tuple(at)]
            mine = parts.reshape(-1, sequences, experts).sum(0)
        if self._has_terms and self.context.contexts.size > 1:
            mine = self.context.whole["cp"].all_reduce(mine)
        return mine, gathered.sum(1)

    def _balanced(self, routing: Routing, sequences: int) -> tuple[np.ndarray, np.ndarray]:
        """Result of `_counts`, and its moves, in a dry run, in which nobody knows where tokens go: as many to each expert.

        `load`, where it is given, says how many of each member of the plane instead, by micro-batch.
        """
        experts, members = self.plane.experts, self.plane.members
        parted = self._has_terms and bool(self.split_sequence) and self.capacity is None
        if self.capacity is not None:
            self.capacity.exchange(sequences)
        self.axis.all_gather(np.zeros((sequences if parted else 1, experts), np.int64))
        if self._has_terms and self.context.contexts.size > 1 and self.capacity is None:
            self.context.whole["cp"].all_reduce(np.zeros((sequences, experts), np.int64))
        everyone = np.array([split_sizes(routing.choices.numel(), experts)] * members)
        if self.load is not None:
            everyone = self.load(self.context.state.key.micro)
        return np.zeros((sequences, experts), np.int64), everyone

    def _sequences(self, batch: Batch) -> int:
        """Number of sequences of which this rank holds parts."""
        context = self.context
        block = context.residual.local_shape(
            (batch.rows, batch.sequence, self.config.hidden), context.grid.shape, context.grid.coordinates
        )
        return block[0]

    def _add_terms(self, routing: Routing, counts: np.ndarray, batch: Batch) -> None:
        """Add this rank's summand of the router losses: a mean over the sequences of the step and over layers.

        Balance: E·Σ_e f_e·P_e of a sequence, with f_e the share of its tokens that go to e, and P_e their mean score. z: the mean
        square of a token's logarithm of the sum of exponentials of logits.
        """
        config, sequences = self.config, len(counts)
        s = batch.sequence * self.context.contexts.size
        tokens = s * (batch.step_rows or batch.rows) * (config.layers - len(config.dense_layers))
        term = routing.logits.new_zeros(())
        if config.balance_weight:
            of_tokens = self.context.batch_first(routing.scores.view(*self._stored(sequences, routing), self.plane.experts))
            factors = torch.from_numpy(counts).to(of_tokens) * (config.balance_weight * self.plane.experts / s / tokens)
            term = term + (of_tokens.sum(1) * factors).sum()
        if config.z_weight:
            term = term + routing.logits.logsumexp(-1).square().sum() * (config.z_weight / tokens)
        self.context.state.add_term(term)

    def _stored(self, sequences: int, routing: Routing) -> tuple[int, int]:
        """The two leading dims of this rank's block of the stream, as stored."""
        rows = len(routing.scores) // sequences
        return (rows, sequences) if self.context.scheme.spec.sequence_first else (sequences, rows)

    def _sent(self, flat: Tensor, take: Tensor, plan: DispatchPlan) -> Tensor:
        """The rows that this rank computes with its experts, by expert: those of X, [t, h/Z], sent k times."""
        tokens, chosen = take // self.config.num_chosen, self.config.num_chosen
        put = _put(take, chosen * len(flat))

        def back(grad: Tensor) -> Tensor:
            return put(grad).unflatten(0, (-1, chosen)).sum(1)

        rows = conjugate(flat, lambda block: block.detach().index_select(0, tokens), back)
        rows = self._exchanged(rows, plan.sent, plan.received)
        place = torch.from_numpy(plan.place).to(flat.device)
        return conjugate(rows, _taken(place), _put(place))

    def _returned(self, rows: Tensor, take: Tensor, plan: DispatchPlan, tokens: int) -> Tensor:
        """Outputs of the experts of this rank's tokens, [t, k, h/Z], for what this rank's experts do; 0 for others."""
        place = torch.from_numpy(plan.place).to(rows.device)
        rows = self._exchanged(conjugate(rows, _put(place), _taken(place)), plan.received, plan.sent)
        chosen = self.config.num_chosen
        return conjugate(rows, _put(take, tokens * chosen), _taken(take)).unflatten(0, (-1, chosen))

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """All-to-all over the plane; backward the other way."""
        axis = self.axis
        if axis.size == 1:
            return rows
        return conjugate(
            rows,
            lambda block: axis.all_to_all(block.detach().contiguous(), 0, sent, received),
            lambda grad: axis.all_to_all(grad.detach().contiguous(), 0, received, sent),
        )

    def _experts_of(self, rows: Tensor, plan: DispatchPlan) -> Tensor:
        """The experts of this rank's group, each of its own rows, in one tensor of all."""
        experts, blocks = self.experts[self.plane.own(self.group)], rows.split(plan.blocks)
        result, unused = list[Tensor](), list[Tensor]()
        for expert, block, total in zip(experts, blocks, plan.totals, strict=True):
            if total or self.shared_weights:  # whose gathers all replicas take part in, with tokens or without
                result.append(self._tiled(expert, block, total) if self.config.moe.tile else expert(block, total))
            else:
                unused += [weight for part in expert.modules() for weight in part._parameters.values() if weight is not None]
        whole = torch.cat(result) if result else rows
        return _Unused.apply(whole, *unused) if unused else whole

    def _tiled(self, expert: nn.Module, block: Tensor, total: int) -> Tensor:
        """An expert of this rank's block of its `total` rows, in tiles: all ranks multiply as many of one shape."""
        tile, parts = self.config.moe.tile or 1, self.plane.parts
        tiles = max(1, -(-total // (parts * tile)))
        padded = functional.pad(block, (0, 0, 0, tiles * tile - len(block)))
        return torch.cat([expert(item, parts * tile) for item in padded.split(tile)])[: len(block)]


def expert_axis(context: Context) -> Axis:
    """The plane of the ranks that exchange tokens: along ep, where the job has it, and the axes that split rows."""
    axes, whole = row_axes(context.residual), context.whole
    return whole[("ep", *axes) if whole.shape.get("ep", 1) > 1 else axes]


def expert_plane(config: ModelConfig, context: Context) -> ExpertPlane:
    """The same plane as data."""
    shape = context.grid.shape
    splits = tuple(shape[axis] for axis in row_axes(context.residual))
    return ExpertPlane(config.num_experts, context.whole.shape.get("ep", 1), splits)


def _taken(order: Tensor) -> Any:
    """A map that takes rows in an order."""
    return lambda block: block.detach().index_select(0, order)


def _put(order: Tensor, rows: int | None = None) -> Any:
    """The inverse of `_taken`: a map that puts rows where the order takes them from; of more rows, the others are 0."""
    every = len(order) if rows is None else rows
    if every == len(order):  # which takes half the time of putting them
        return _taken(torch.empty_like(order).index_copy_(0, order, torch.arange(every, device=order.device)))
    return lambda block: block.new_zeros(every, block.shape[1]).index_copy_(0, order, block.detach())
