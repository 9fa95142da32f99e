"""A causal language model of Transformers as a model of the training loop: its layers are blocks, its own code is the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...errors import ConfigError
from ...layout.distribute import collect
from ...layout.random import key
from ..config import ModelConfig
from ..context import Context
from ..layers.dropout import Batch
from ..layers.embedding import Embedding
from ..layers.joint_sums import JointSums
from ..models.base import Body, Inputs, LanguageModel
from ..random import normal_
from .cells import ForwardCells, LayerCall
from .folder import empty_model, read_weights
from .model import StoredPart, stored_part
from .parallelise import adopt
from .source import config_of, sizes_of

PLAN = "base_model_pp_plan"
OWN = "module."
"""The beginning of a parameter's name that is of no layer."""


class MetaAttention(TorchFunctionMode):
    """Within it, fused attention of tensors without memory takes the kernel that the host takes: else torch keeps the scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _fused(*args, **(kwargs or {}))


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        k, v = (item.repeat_interleave(q.shape[1] // item.shape[1], 1) for item in (k, v))
    mask = None if attn_mask is None else attn_mask.to(q.dtype)
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale
    )
    return result[0]


class AdoptedBlock(nn.Module):
    """One layer of another library's model, and its number."""

    def __init__(self, layer: nn.Module, index: int, scheme: Context) -> None:
        super().__init__()
        self.layer, self.index = layer, index
        self._joint_sums = JointSums(scheme.grid.shape, layer)

    def forward(self, x: Tensor, batch: Batch, calls: Sequence[LayerCall]) -> Tensor:
        """This rank's block of the residual stream → the same layout. calls : those of all layers of the model."""
        call = calls[self.index]
        with self._joint_sums():
            if not x.is_meta:
                y = self.layer(x, *call.args, **call.kwargs)
            else:
                with MetaAttention():
                    y = self.layer(x, *call.args, **call.kwargs)
        if not isinstance(y, Tensor):
            raise ConfigError(
                f"A {type(self.layer).__name__} returns a {type(y).__name__}; layers that training runs return the stream alone."
            )
        return y


class AdoptedDecoder(LanguageModel):
    """A causal language model of a Transformers folder, in cells: before its layers, each layer, and behind them.

    config : of family "hf": `config_json` is the folder's config.json, of whose layers the first `layers` are taken

    What `parallelise` makes of the model, by its own plan. Weights are drawn as those of our families, by name and place, vectors
    as the model sets them; `read` takes a folder's. Parameters of layers are named `blocks.N.layer.…`, all others `module.…`.

    Raises ConfigError without the package transformers, for a model that has no pipeline plan, and as `parallelise`; LayoutError
    where the scheme cannot split its sizes, for schemes that split sequences and for contexts.
    """

    def __init__(self, config: ModelConfig, scheme: Context, dtype: torch.dtype = torch.float32, seed: int = 1) -> None:
        Body.__init__(self, config, scheme, seed)
        if config.dropout or config.attention_dropout:
            raise ConfigError("model.dropout and attention_dropout are of our own families; a folder's config.json has its own.")
        assert config.config_json is not None, "ModelConfig checks it"
        its_config = config_of(config.config_json, config.layers)
        _check_sizes(config, its_config)
        module = empty_model(its_config, dtype)
        path = _layers_of(module)
        layers: Any = module.get_submodule(path)
        self.cells = ForwardCells(module, layers)
        self.cells.check(config.hidden)
        drawn = {name for name, p in module.named_parameters() if p.is_meta}
        tables = [id(module.get_input_embeddings())]
        names = {id(item): name for name, item in module.named_modules()}

        def at(name: str) -> Context:
            if result := re.match(re.escape(path) + r"\.(\d+)\.", name):
                return scheme.on_layer(int(result[1]))
            if [names.get(table) for table in tables] == [name]:
                return scheme.on_ends(True, config.tied)
            return scheme.on_ends(last=True)

        adopt(module, scheme, None, None, at)
        self.blocks = nn.ModuleList(AdoptedBlock(layer, index, scheme) for index, layer in enumerate(layers))
        self.module, self.path = module, path
        self._draw(drawn, seed, float(getattr(its_config, "initializer_range", 0.02)))

    def _draw(self, drawn: set[str], seed: int, std: float) -> None:
        """Write the first values of the parameters that the model itself would draw."""
        for name, part in self.stored().items():
            owner, _, leaf = name.rpartition(".")
            p: Any = self.get_submodule(owner)._parameters[leaf]
            if not p.dim():
                raise ConfigError(f"The parameter {part.name} has no dims; checkpoints and ZeRO split along the first.")
            if part.name in drawn and p.dim() == 1:
                p.data.zero_()
            elif part.name in drawn:
                normal_(p.data, key(seed, name), p.sharding.shape, p.sharding.slices(p.grid), std)

    def stored(self) -> dict[str, StoredPart]:
        """Name of each parameter → the part of the folder's tensor that this rank's block of it is."""
        result = {}
        for name, _ in self.named_parameters():
            result[name] = stored_part(self.module, self._within(name))
        return result

    def _within(self, name: str) -> str:
        """The name, in the adopted module, of a parameter."""
        if name.startswith(OWN):
            return name.removeprefix(OWN)
        _, number, _, rest = name.split(".", 3)
        return f"{self.path}.{number}.{rest}"

    def read(self, folder: Path) -> None:
        """Write this rank's blocks of the weights of a Transformers folder. Raises CheckpointError as `from_folder`."""
        read_weights(self.module, folder)

    def recompute(self, kind: str, layers: int = 1, distributed: bool = False) -> None:
        """As that of our families, but for "selective": raises ConfigError, as attention is the model's own."""
        if kind == "selective":
            raise ConfigError('recompute = "selective" recomputes our own attention. Values for a folder\'s model: none, full.')
        super().recompute(kind, layers, distributed)

    def before_layers(self) -> list[Tensor]:
        """All weights outside the layers, whose use is up to the model's own code, but for a head that has its own."""
        others = set(map(id, self.blocks.parameters()))
        if not self.config.tied:
            others.update(map(id, self.output().parameters()))
        return [weight for weight in self.module.parameters() if id(weight) not in others]

    def output(self) -> Embedding:
        """The head."""
        head: Embedding = self.module.get_output_embeddings()
        return head

    def check(self, inputs: Inputs) -> None:
        """As that of our families; raises ConfigError for masks."""
        if given := sorted(inputs.keys() & {"attention_mask", "documents"}):
            raise ConfigError(f"A folder's model is trained on whole windows: no {' and no '.join(given)}.")
        super().check(inputs)

    def visible(self, inputs: Inputs) -> Any:
        """The inputs that the model's own code gives its layers beside the stream."""
        rows, sequence = inputs["tokens"].shape
        context, table = self.context, self.module.get_input_embeddings().weight
        shape = rows, sequence, self.config.hidden
        block = context.residual.local_shape(shape, context.grid.shape, context.grid.coordinates)
        return self.cells.calls(block, table)

    def enter(self, inputs: Inputs, batch: Batch) -> Tensor:
        """The embedded tokens, as the model's own code makes them."""
        return self.cells.enter(inputs["tokens"])

    def leave(self, x: Tensor, inputs: Inputs, batch: Batch) -> Tensor:
        """The loss of the next tokens: the model's own norm, head and what it does to logits, and cross entropy in blocks."""
        layout = self.output().logits_layout
        return self.loss(self.cells.leave(x), inputs["labels"], layout, self.config.vocabulary, batch.count)

    @torch.no_grad()
    def logits(self, tokens: Tensor, attention_mask: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """The global logits [b, s, v] of every position, on every rank."""
        given = {"attention_mask": attention_mask, "documents": documents}
        inputs = {"tokens": tokens, **{name: item for name, item in given.items() if item is not None}}
        batch = self.batch_of(inputs)
        return self.whole_logits(self.cells.leave(self.encoded(inputs, batch)), self.output().logits_layout, batch)

    def leave_at(self, x: Tensor, position: int, batch: Batch) -> Tensor:
        """The global logits [b, v] of one position of the residual stream x after the last layer, on every rank of the stage."""
        here = self.cells.leave(x, logits_to_keep=torch.tensor([position], device=x.device))
        shape = (batch.rows, 1, self.config.vocabulary)
        return collect(here, self.context.grid, self.output().logits_layout, shape)[:, 0]


def _check_sizes(config: ModelConfig, its_config: Any) -> None:
    """Raise ConfigError for a size that is not that of config.json."""
    for name, value in sizes_of(its_config).items():
        if name != "sequence" and getattr(config, name) != value:
            raise ConfigError(
                f"model.{name} is {getattr(config, name)}, but config.json makes it {value}. Change config.json, and train its "
                "folder; model.layers, of which the first are taken, and model.sequence alone may differ."
            )


def _layers_of(module: nn.Module) -> str:
    """The name of the list of layers in a model's pipeline plan."""
    plan: Mapping[str, Any] = getattr(getattr(module, "config", None), PLAN, None) or {}
    prefix = getattr(module, "base_model_prefix", "")
    layers = [f"{prefix}.{name}" for name in plan]
    lists = [name for name in layers if isinstance(module.get_submodule(name), nn.ModuleList)]
    if len(lists) != 1:
        raise ConfigError(
            f"{type(module).__name__} has no plan of its layers in a pipeline ({PLAN}), which training reads. "
            "summa3d.nn.parallelise takes it, in a loop of yours."
        )
    return lists[0]
