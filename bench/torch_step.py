"""The training step of our GPT in plain torch and in torch.distributed (gloo), with our serial weights, for step_vs_torch.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from plain_block import PlainBlock
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from summa3d.launcher.runtime import on_all_cores
from summa3d.nn import ModelConfig
from summa3d.nn.context import scheme
from summa3d.nn.models.registry import build
from summa3d.train.config import Config
from summa3d.train.optimizer import learning_rate

SCHEDULES = {
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-h1": schedules.ScheduleInterleavedZeroBubble,  # of one stage a rank it is ZB-H1
    "zb-v": schedules.ScheduleZBVZeroBubble,
}
Draw = Callable[[int], Mapping[str, Tensor]]
"""The whole batch of a step, by the step's number from 1: `tokens` and `labels`, [rows, sequence]."""
Pass = Callable[[Mapping[str, Tensor]], Tensor]
"""Forward and backward of a step's batch, with its gradients summed over the ranks: this rank's part of the loss."""


def join(world: Any) -> None:
    """Make torch's process group of these ranks, over gloo; collective."""
    with on_all_cores():  # gloo's own threads start here
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if world.rank == 0 else None
        port = world.bcast(None if store is None else store.port)
        store = store or dist.TCPStore("127.0.0.1", port)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=120))


class PlainStage(nn.Module):
    """The layers first … last−1 of a GPT with a tied head, on tokens where it `enters`, to logits where it `leaves`.

    num_shards : ranks over which heads will be split
    """

    def __init__(self, config: ModelConfig, first: int, last: int, num_shards: int = 1) -> None:
        super().__init__()
        self.enters, self.leaves = first == 0, last == config.layers
        if self.enters or self.leaves:
            self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        if self.enters:
            self.positions = nn.Embedding(config.sequence, config.hidden)
        self.blocks = nn.ModuleDict({str(layer): PlainBlock(config, num_shards) for layer in range(first, last)})
        if self.leaves:
            self.norm = nn.LayerNorm(config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [b, s] or the stream [b, s, h] → the stream, or logits [b, s, v]."""
        if self.enters:
            x = self.embedding(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        if not self.leaves:
            return x
        x, table = self.norm(x), self.embedding.weight
        if isinstance(table, DTensor) and not isinstance(x, DTensor):
            x = DTensor.from_local(x, table.device_mesh, [Replicate()])
        return functional.linear(x, table)

    def fill(self, weights: Mapping[str, Tensor]) -> PlainStage:
        """Overwrite all parameters by ours, whose linear weights are [inputs, outputs]."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                linear = parameter.dim() == 2 and name.startswith("blocks.")
                parameter.copy_(weights[name].T if linear else weights[name])
        return self


class TorchStep:
    """Steps of a torch model as `summa3d train` takes them: backward, the global norm, clipping, AdamW.

    model : whose parameters this rank updates. shared : of them, those that another rank counts in the norm. optimizer : makes
    the optimizer of groups of parameters. whole_norm : whether each rank's gradients are the whole model's.
    """

    threads: AbstractContextManager[None] = nullcontext()

    def __init__(
        self,
        config: Config,
        draw: Draw,
        model: nn.Module,
        run: Pass,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        whole_norm: bool = True,
        shared: Iterable[Tensor] = (),
    ) -> None:
        self.settings, self.draw, self.run, self.whole_norm = config.train, draw, run, whole_norm
        self.parameters = list(model.parameters())
        self.shared = {id(parameter) for parameter in shared}
        self.optimizer = optimizer([group for group in self._groups() if group["params"]])
        self.taken = 0

    def _groups(self) -> Iterable[dict[str, Any]]:
        """Matrices decay, vectors do not; a fused step takes tensors of one kind."""
        for is_sharded in (False, True):
            for decays in (True, False):
                chosen = [p for p in self.parameters if isinstance(p, DTensor) is is_sharded and (p.dim() == 2) is decays]
                yield {"params": chosen, "weight_decay": self.settings.weight_decay if decays else 0.0}

    def __call__(self) -> float:
        """Take the next step; returns this rank's part of its loss."""
        self.taken += 1
        self.optimizer.zero_grad()
        loss = self.run(self.draw(self.taken))
        self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.taken, self.settings)
        self.optimizer.step()
        return float(loss.detach())

    def _clip(self) -> None:
        plain = [p.grad for p in self.parameters if not isinstance(p, DTensor) and id(p) not in self.shared]
        sharded = [p.grad for p in self.parameters if isinstance(p, DTensor)]
        norms = [torch.nn.utils.get_total_norm(plain)] if plain else []
        if sharded:
            norms.append(torch.nn.utils.get_total_norm(sharded).full_tensor())
        norm = torch.stack(norms).norm()
        if not self.whole_norm:
            total = norm.square()
            dist.all_reduce(total)
            norm = total.sqrt()
        for chosen in (True, False):
            mine = [p for p in self.parameters if isinstance(p, DTensor) is chosen]
            if mine:
                torch.nn.utils.clip_grads_with_norm_(mine, self.settings.clip, norm)


def loss_of(count: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The cross entropy of logits [b, s, v] and labels [b, s], divided by `count`."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        whole = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return whole / count

    return loss


class Peers:
    """Torch's side of each pair, on the ranks of a job; every method is collective and returns its step.

    threads : of the fused optimizer. draw : gives the batch of a step
    """

    def __init__(self, config: Config, draw: Draw, ranks: int, rank: int) -> None:
        self.config, self.draw, self.ranks, self.rank = config, draw, ranks, rank
        train, model = config.train, config.model
        options = {"betas": train.betas, "eps": train.epsilon, "fused": True}
        self.adamw = partial(torch.optim.AdamW, **options)
        self.sharded = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, **options)
        self.loss = loss_of(train.batch * model.sequence)
        self.replica_loss = loss_of(train.batch * model.sequence // ranks)  # DDP and FSDP average the gradients of the replicas
        self.weights = build(model, scheme("serial"), torch.float32, train.seed).state_dict()

    def _whole(self, num_shards: int = 1) -> PlainStage:
        return PlainStage(self.config.model, 0, self.config.model.layers, num_shards).fill(self.weights)

    def _backward(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        loss = self.loss(model(inputs["tokens"]), inputs["labels"])
        loss.backward()
        return loss.detach()

    def _own_rows(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        rows = len(inputs["tokens"]) // self.ranks
        own = slice(self.rank * rows, (self.rank + 1) * rows)
        loss = self.replica_loss(model(inputs["tokens"][own]), inputs["labels"][own])
        loss.backward()
        return loss.detach() / self.ranks

    def plain(self) -> TorchStep:
        """One rank: plain torch."""
        model = self._whole()
        return TorchStep(self.config, self.draw, model, partial(self._backward, model), self.adamw)

    def zero(self) -> TorchStep:
        """DistributedDataParallel under ZeroRedundancyOptimizer."""
        return self._replicas(self.sharded)

    def ddp(self) -> TorchStep:
        """DistributedDataParallel."""
        return self._replicas(self.adamw)

    def _replicas(self, optimizer: Any) -> TorchStep:
        model = DistributedDataParallel(self._whole(), gradient_as_bucket_view=True)
        return TorchStep(self.config, self.draw, model, partial(self._own_rows, model), optimizer)

    def fsdp(self) -> TorchStep:
        """FSDP2: every block, and the rest, are sharded."""
        mesh, model = init_device_mesh("cpu", (self.ranks,)), self._whole()
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return TorchStep(self.config, self.draw, model, partial(self._own_rows, model), self.adamw)

    def tensor_parallel(self) -> TorchStep:
        """Colwise and rowwise parallel blocks, a table that is split by the vocabulary, and the parallel loss."""
        mesh: DeviceMesh = init_device_mesh("cpu", (self.ranks,))
        model, column, row = self._whole(self.ranks), ColwiseParallel, RowwiseParallel
        for block in model.blocks.values():
            plan = {"attention.qkv": column(), "attention.out": row(), "mlp.up": column(), "mlp.down": row()}
            parallelize_module(block, mesh, plan)
        parallelize_module(model, mesh, {"embedding": row(input_layouts=Replicate())})

        def run(inputs: Mapping[str, Tensor]) -> Tensor:
            with loss_parallel():
                loss = self._backward(model, inputs)
            return (loss.full_tensor() if isinstance(loss, DTensor) else loss) / self.ranks

        return TorchStep(self.config, self.draw, model, run, self.adamw)

    def pipeline(self) -> TorchStep:
        """The configuration's schedule over its stages; a table that two ranks hold is summed over both."""
        how, micro = self.config.pipeline, self.config.train.accumulate
        count, per_stage = self.ranks * how.chunks, self.config.model.layers // (self.ranks * how.chunks)
        chunks = range(how.chunks)
        places = [self.rank + chunk * self.ranks for chunk in chunks]
        if how.schedule == "zb-v":
            places = [self.rank, count - 1 - self.rank]
        modules = [PlainStage(self.config.model, k * per_stage, (k + 1) * per_stage).fill(self.weights) for k in places]
        ends = [module for module in modules if module.enters or module.leaves]
        if len(ends) == 2:
            ends[1].embedding = ends[0].embedding
        stages = [PipelineStage(m, k, count, torch.device("cpu")) for m, k in zip(modules, places, strict=True)]
        multi = how.schedule != "1f1b"
        schedule = SCHEDULES[how.schedule](stages if multi else stages[0], micro, self.loss, scale_grads=False)
        holders = [0, self.ranks - 1] if how.schedule != "zb-v" and self.ranks > 1 else []
        group = dist.new_group(holders) if holders else None

        def run(inputs: Mapping[str, Tensor]) -> Tensor:
            losses: list[Tensor] = []
            given = (inputs["tokens"],) if 0 in places else ()
            last = {"target": inputs["labels"], "losses": losses} if count - 1 in places else {}
            schedule.step(*given, **last, return_outputs=False)
            if group is not None and ends:
                dist.all_reduce(ends[0].embedding.weight.grad, group=group)
            return sum(losses, torch.zeros(()))

        again = [ends[0].embedding.weight] if group is not None and ends and not ends[0].enters else []
        return TorchStep(self.config, self.draw, nn.ModuleList(modules), run, self.adamw, False, again)
