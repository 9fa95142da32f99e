"""A module of torch's layers on a grid: linear layers, tables and norms are replaced, the rest of its code runs as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from ...comm.topology import describe, replica_axes
from ...errors import ConfigError
from ...layout.layout import Layout
from ..context import Context
from ..layers.fused_linear import FusedLinear, can_join
from ..layers.linear import Linear
from ..layers.siblings import SiblingLinear, Siblings
from ..schemes.validate import Need
from .kept import keep
from .layers import FusedParts, PositionTable, TokenTable, VocabularyHead, WholeHeads, loss_of, new_norm
from .model import adopt_class
from .norms import recognise
from .probe import compare, record
from .report import AdoptedLayer, Adoption
from .roles import FIRST, HEAD, KEPT, SECOND, STYLES, owner_of, plan_of, styles_of
from .sizes import check_needs, check_scheme, of_batch, of_heads, shared_heads
from .source import config_number
from .stand_in import StandsIn
from .trace import FLAT, HEADS, STREAM, Uses, is_norm, trace

GlobalInputs = Mapping[str, Tensor] | tuple[Tensor, ...]
NUMBERS_OF_HEADS = ("num_attention_heads", "num_heads", "n_heads", "num_key_value_heads", "num_kv_heads")
"""Attributes of an attention module, and of its config, that become a rank's own."""
QUERIES_OF_ONE = "num_key_value_groups"
"""Attribute with the number of query heads to one of k and v."""
OF_ROWS = ("attention_mask", "position_ids")
"""Global [b, s] inputs that attention alone reads: cut as its rows."""
GLOBAL = ("input_ids", "labels", "shift_labels", "num_items_in_batch", "logits_to_keep")
"""GlobalInputs that are passed on whole: layers take this rank's part of them."""
ATTENTIONS = ("eager", "sdpa")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def parallelise(
    module: nn.Module, scheme: Context, plan: Mapping[str, str] | None = None, probe: GlobalInputs | bool | None = None
) -> nn.Module:
    """Run a module of torch's layers on a grid: replace its layers in place, keep its code, and return it.

    Parameters
    ----------
    module : a causal language model of Transformers, or a module of your own; the same weights on every rank
    scheme : what `nn.scheme` returns; any that keeps sequences whole
    plan : names of linear layers (the last components; * is anything but a dot) → "first", which leaves the residual stream, or
        "second", which returns to it. Default, the model's own `base_model_tp_plan`
    probe : a small global batch, as keywords or positional: outputs of layers and gradients of all parameters are compared with
        the unsplit module's, in its dtype. Default, ids or rows are made up for a plan of your own, and none for a listed
        model; False, none

    Linear layers, token and position tables, the head and norms become those of `summa3d.nn`, with the module's weights under
    the module's names. Parameters that stay are copies, whose gradients are summed. GlobalInputs are global, equal on every rank:
    ``model(input_ids=ids, labels=labels).loss`` is the loss of the whole batch, and logits are this rank's block. Other modules
    than Transformers' get their floating-point inputs [b, s, h] cut likewise, and return this rank's block.
    ``print(model.adoption)`` says what became of each layer, ``model.adoption.table(rows)`` with the words of each product.

    Moves nothing but the probe. Raises ConfigError, naming the layer, for what differs in the probe and for what it cannot run:
    patterns that match nothing, linear layers that the plan lacks, unknown styles, experts, dropout, reductions over split dims;
    LayoutError, naming grids that fit, for heads that axes do not divide, and for schemes that split sequences. What only the
    probe sees: code that reads a global size by itself.
    """
    return adopt(module, scheme, plan, probe, lambda name: scheme)


def adopt(
    module: nn.Module,
    scheme: Context,
    plan: Mapping[str, str] | None,
    probe: GlobalInputs | bool | None,
    at: Callable[[str], Context],
) -> nn.Module:
    """As `parallelise`; at : name of a module → the context that its parameters are made with, such as that of a stage."""
    check_scheme(scheme)
    config = getattr(module, "config", None)
    is_listed = plan is None
    output: Any = getattr(module, "get_output_embeddings", lambda: None)
    head = output()
    styles = styles_of(module, plan_of(module) if plan is None else plan, head, is_listed)
    adopter = _Adopter(module, scheme, styles, head, config, at)
    if config is not None and is_listed:
        adopter.check_config()
    inputs = _small(module, scheme) if probe is None or isinstance(probe, bool) else probe
    uses = trace(module, adopter.traced_roles(), inputs)
    compared = plan is not None if probe is None else probe is not False
    layers = dict.fromkeys([*uses.tables, *(name for name, style in styles.items() if STYLES[style] != KEPT)])
    before = record(module, inputs, layers) if compared else None
    adopter.replace(uses)
    module.register_forward_pre_hook(partial(_cut, scheme, config is not None and is_listed), with_kwargs=True)
    module.adoption = adopter.report  # type: ignore[assignment]
    if hasattr(module, "save_pretrained"):
        adopt_class(module)
    if before is not None:
        layouts = {name: adopter.inner if STYLES[styles.get(name, SECOND)] == FIRST else scheme.residual for name in layers}
        layouts |= {name: Layout((), scheme.residual.dims[-1]) for name, of_ids in uses.tables.items() if not of_ids}
        compare(module, scheme, inputs, before, layouts, scheme.residual if uses.result == STREAM else adopter.inner)
    return module


def _small(module: nn.Module, scheme: Context) -> GlobalInputs:
    """A batch that the grid can split: ids where the module has a token table, else rows as wide as its first linear layer's."""
    stream, inner = scheme.residual, scheme.scheme.after_linear(scheme.residual)
    shape, generator = scheme.scheme.shape, torch.Generator().manual_seed(1)
    rows = 2 * lcm(stream.num_shards(0, shape), inner.num_shards(0, shape))
    output: Any = getattr(module, "get_output_embeddings", None)
    first = next((item for item in module.modules() if isinstance(item, (nn.Embedding, nn.Linear))), None)
    if isinstance(first, nn.Linear) and output is None:
        return (torch.randn(rows, 5, first.in_features, generator=generator, dtype=first.weight.dtype),)
    vocabulary = first.num_embeddings if isinstance(first, nn.Embedding) else 1
    ids = torch.randint(0, vocabulary, (rows, 5), generator=generator)
    return (ids,) if output is None else {"input_ids": ids}


class _Adopter:
    """The replacement of one module's layers."""

    def __init__(
        self,
        module: nn.Module,
        scheme: Context,
        styles: Mapping[str, str],
        head: Any,
        config: Any,
        at: Callable[[str], Context],
    ) -> None:
        self.module, self.scheme, self.styles, self.config, self.at = module, scheme, styles, config, at
        self.modules = dict(module.named_modules())
        self.names = {id(module): name for name, module in self.modules.items()}
        self.canonical = {id(p): name for name, p in module.named_parameters()}
        self.head = self.names.get(id(head)) if head is not None else None
        self.inner = scheme.scheme.after_linear(scheme.residual)
        self.report = Adoption()
        self._check_shared()
        self._check_hooks()

    def _check_shared(self) -> None:
        """Raise ConfigError for a module at two places, and for a parameter that two layers share but for a model's head."""
        places: dict[int, list[str]] = {}
        for name, item in self.module.named_modules(remove_duplicate=False):
            if next(item.parameters(recurse=False), None) is not None:
                places.setdefault(id(item), []).append(name)
        shared = [names for names in places.values() if len(names) > 1]
        weights: dict[int, list[str]] = {}
        for name, item in self.modules.items():
            for p in item.parameters(recurse=False) if name != self.head else ():
                weights.setdefault(id(p), []).append(name)
        shared += [names for names in weights.values() if len(names) > 1]
        if shared:
            raise ConfigError(
                f"{' and '.join(shared[0])} share their parameters, and would be replaced apart. Give each its own."
            )

    def _check_hooks(self) -> None:
        """Raise ConfigError for a hook of a layer that is replaced."""
        tables = [name for name, module in self.modules.items() if isinstance(module, nn.Embedding) or is_norm(module)]
        for name in (*self.styles, *tables):
            item = self.modules[name]
            if any(getattr(item, hooks) for hooks in HOOKS):
                raise ConfigError(
                    f"{name}, a {type(item).__name__}, has a hook, which its replacement would not have. Remove it."
                )

    def check_config(self) -> None:
        """Raise ConfigError for an unknown implementation of attention; LayoutError where axes do not divide the heads."""
        name = getattr(self.config, "_attn_implementation", None)
        if name not in ATTENTIONS:
            raise ConfigError(
                f"the attention {name!r} is not known to read a rank's block alone. Set attn_implementation to one of "
                f"{', '.join(ATTENTIONS)}."
            )
        if heads := config_number(self.config, "num_attention_heads"):
            kv_heads = config_number(self.config, "num_key_value_heads") or heads
            check_needs(self.scheme, of_heads(self.scheme, heads, kv_heads, self._head_size() or 1))

    def traced_roles(self) -> dict[str, str]:
        """The layer under whose name a role's weight is found → the role; a tied head's is the table's."""
        roles = {name: STYLES[style] for name, style in self.styles.items() if STYLES[style] != KEPT}
        if self.head is not None:
            roles[self.head] = HEAD
        return {owner_of(self.canonical[id(self.modules[name].weight)]): role for name, role in roles.items()}

    def replace(self, uses: Uses) -> None:
        """Replace every layer; all is checked before the first one changes."""
        made: dict[str, nn.Module] = {}
        for name, of_ids in uses.tables.items():
            made[name] = self._table(name, of_ids)
        for name, style in self.styles.items():
            if STYLES[style] != KEPT:
                made[name] = self._linear(name, style)
        if self.head is not None:
            made[self.head] = self._head(self.head, made)
        for name, (place, n) in uses.norms.items():
            norm = self._norm(name, place, n)
            if norm is not None:
                made[name] = norm
        for name, plane in self._kept(uses, made).items():
            owner, _, leaf = name.rpartition(".")
            keep(self.modules[owner], leaf, self.at(owner), plane)
        joined, shared = self._joined(uses, made), self._share(uses, made)
        for name, layer in made.items():
            self._put(name, layer, joined.get(name), shared.get(name))
        self._local_heads(made, shared)

    def _share(self, uses: Uses, made: Mapping[str, nn.Module]) -> dict[str, WholeHeads]:
        """Let layers whose heads ranks share return whole ones, and return what does so; LayoutError where not all are known."""
        num_shards = self.scheme.columns(self.inner).size
        shared: dict[str, WholeHeads] = {}
        for name, heads in shared_heads(uses.heads, num_shards).items():
            layer, new = made[name], partial(WholeHeads, self.scheme, self.inner, heads)
            if isinstance(layer, FusedParts):
                layer.whole = shared[name] = new(sum(part.n == heads.columns for part in layer.joined.linears))
            elif len(uses.heads[name]) == 1:
                shared[name] = new(1)
                shared[name].follow(layer)
        count = config_number(self.config, "num_key_value_heads")
        unknown = {owner_of(name) for name in uses.heads} - {owner_of(name) for name in shared}
        if count and count % num_shards and (unknown or not shared):
            why = f"{min(unknown, default='Attention')} cuts k and v in a way that is not known, so that ranks do not share one."
            check_needs(self.scheme, [Need("num_key_value_heads", count, self.inner.dims[-1], why)])
        return shared

    def _joined(self, uses: Uses, made: Mapping[str, nn.Module]) -> dict[str, tuple[str, FusedLinear]]:
        """Name of each layer that makes a product with others → what is said of it, and the product.

        They are layers of one input, where axes split their columns: else they would move as much, each for itself.
        """
        joined: dict[str, tuple[str, FusedLinear]] = {}
        for owner, names in uses.siblings if self.scheme.columns(self.inner).size > 1 else ():
            alike: dict[object, list[str]] = {}
            for name in names:
                if isinstance(layer := made[name], SiblingLinear):
                    alike.setdefault((layer.bias is None, layer.weight.dtype, layer.context.at), []).append(name)
            for group in alike.values():
                linears: list[Any] = [made[name] for name in group]
                if len(group) > 1 and can_join(*linears):
                    product = Siblings(self.modules[owner], linears).joined
                    first, *rest = (name.rpartition(".")[2] for name in group)
                    joined |= dict.fromkeys(group, (f", in the product of {first}", product))
                    joined[group[0]] = f", one product with {' and '.join(rest)}", product
        return joined

    def _put(self, name: str, layer: nn.Module, joined: tuple[str, FusedLinear] | None, whole: WholeHeads | None) -> None:
        owner, _, leaf = name.rpartition(".")
        was = self.modules[name]
        layer.train(was.training)
        setattr(self.modules[owner], leaf, layer)
        kind = Linear if isinstance(layer, Linear) else type(layer)
        said, together = joined or ("", None)
        said += f", heads gathered from {whole.heads.sharing} ranks" if whole else ""
        now = f"{kind.__name__}({layer.extra_repr()}){said}"
        self.report.layers.append(AdoptedLayer(name, type(was).__name__, now, layer, together, whole))

    def _linear(self, name: str, style: str) -> nn.Module:
        old: Any = self.modules[name]
        k, n, bias, dtype = old.in_features, old.out_features, old.bias is not None, old.weight.dtype
        new: nn.Module
        if STYLES[style] == SECOND:
            new = Linear(k, n, self.at(name), self.inner, bias=bias, dtype=dtype)
        elif widths := self._widths(style, n):
            new = FusedParts(k, widths, self.at(name), bias, dtype)
            for part, *whole in zip(new.parts, *(p.split(widths) for p in old.parameters()), strict=True):
                _fill(part, dict(zip(("weight", "bias"), whole, strict=False)))
            return new
        else:
            new = SiblingLinear(k, n, self.at(name), bias=bias, dtype=dtype)
        return _fill(new, dict(old.named_parameters()))

    def _widths(self, style: str, n: int) -> list[int] | None:
        """The widths of q, k and v, or of gate and up, where a layer is all of them side by side."""
        if style != "colwise_gather_output" or self.config is None:
            return None
        heads, f = config_number(self.config, "num_attention_heads"), config_number(self.config, "intermediate_size")
        h, kv = config_number(self.config, "hidden_size"), config_number(self.config, "num_key_value_heads") or heads
        if heads and h and kv:
            d = config_number(self.config, "head_dim") or h // heads
            if n == (heads + 2 * kv) * d:
                return [heads * d, kv * d, kv * d]
        return [f, f] if f and n == 2 * f else None

    def _table(self, name: str, of_ids: bool) -> nn.Module:
        old: Any = self.modules[name]
        scale = getattr(old, "embed_scale", None)
        if (type(old) is not nn.Embedding and scale is None) or old.max_norm is not None or old.sparse or old.scale_grad_by_freq:
            raise ConfigError(f"{name}, a {type(old).__name__}, embeds in a way that is not known: {old}.")
        v, h, dtype = old.num_embeddings, old.embedding_dim, old.weight.dtype
        if not of_ids:
            return _fill(PositionTable(v, h, self.at(name), dtype), {"weight": old.weight})
        scale = torch.as_tensor(scale) if scale is not None else None
        return _fill(TokenTable(v, h, self.at(name), dtype, old.padding_idx, scale), {"weight": old.weight})

    def _head(self, name: str, made: Mapping[str, nn.Module]) -> nn.Module:
        old: Any = self.modules[name]
        if type(old) is not nn.Linear:
            raise ConfigError(f"the head {name} is a {type(old).__name__}; heads are torch.nn.Linear.")
        new = VocabularyHead(old.out_features, old.in_features, self.at(name), old.weight.dtype, old.bias is not None)
        _fill(new, dict(old.named_parameters()))
        table = made.get(owner_of(self.canonical[id(old.weight)]))
        if isinstance(table, TokenTable):
            new.weight = table.weight
        self.module.loss_function = loss_of(self.scheme, new.logits_layout, self._check_alone)  # type: ignore[assignment]
        return new

    def _check_alone(self) -> None:
        shape = self.scheme.whole.shape
        if replicas := {axis: shape[axis] for axis in replica_axes(shape)}:
            raise ConfigError(
                f"A loss on replicas ({describe(replicas)}) needs num_items_in_batch, the labels of the whole step."
            )

    def _norm(self, name: str, place: str, n: int) -> nn.Module | None:
        old = self.modules[name]
        kind = recognise(name, old, n)
        if place == HEADS and n == self._head_size():
            return None  # a rank has all of what is normed: its vectors stay
        layouts = {STREAM: self.scheme.residual, FLAT: self.inner, HEADS: self.inner}
        if place not in layouts:
            raise ConfigError(f"{name} norms {place}, which no model does that was tried.")
        vectors = dict(old.named_parameters())
        dtype = next(iter(vectors.values())).dtype if vectors else torch.float32
        return _fill(new_norm(kind, n, list(vectors), self.at(name), layouts[place], dtype), vectors)

    def _head_size(self) -> int | None:
        heads, h = (config_number(self.config, key) for key in ("num_attention_heads", "hidden_size"))
        return config_number(self.config, "head_dim") or (h // heads if h and heads else None)

    def _kept(self, uses: Uses, made: Mapping[str, nn.Module]) -> dict[str, Sequence[str]]:
        """The parameters that stay where they are, as copies, and the axes over which their gradients are summed."""
        kept: dict[str, Sequence[str]] = {}
        sizes = {1, *([d] if (d := self._head_size()) else [])}
        for name, p in self.module.named_parameters():
            owner = owner_of(name)
            if owner in made:
                continue
            places = uses.places.get(name, set())
            if owner in uses.norms:
                places = {uses.norms[owner][0]}
            if len(places) > 1 or (p.numel() != 1 and (places - {HEADS} or p.shape[-1] not in sizes)):
                raise ConfigError(
                    f"the parameter {name} {list(p.shape)} is used in {' and '.join(sorted(places)) or 'no place that was seen'},"
                    " where a rank has a block alone: only linear layers, tables and norms are split."
                )
            place = next(iter(places), None)
            split = {None: Layout(), STREAM: self.scheme.residual}.get(place, self.inner)
            plane = [axis for axes in split.dims for axis in axes]
            kept[name] = plane
            summed = f", its gradient summed over {'·'.join(plane)}" if plane else ""
            self.report.layers.append(AdoptedLayer(name, str(list(p.shape)), f"a copy on all ranks{summed}"))
        return kept

    def _local_heads(self, made: Mapping[str, nn.Module], shared: Mapping[str, WholeHeads]) -> None:
        """Let the modules that hold a first linear layer count a rank's own heads, and these heads' rows."""
        num_shards = self.scheme.columns(self.inner).size
        rows = StandsIn(*_row_shards(self.scheme))
        owners: dict[str, list[nn.Module]] = {}
        one_of = {owner_of(name): whole.heads.heads for name, whole in shared.items()}
        for name, style in self.styles.items():
            if STYLES[style] == FIRST:
                owners.setdefault(owner_of(name), []).append(made[name])
        for name, linears in owners.items():
            owner: Any = self.modules[name]
            if self.config is not None and rows.stream != rows.heads:
                rows.apply(owner, linears)
            own = [owner]
            if num_shards > 1 and hasattr(getattr(owner, "config", None), "num_attention_heads"):
                owner.config = copy.copy(owner.config)
                if not getattr(owner.config, "head_dim", None) and self._head_size():
                    owner.config.head_dim = self._head_size()
                own.append(owner.config)
            for item in own:
                for key in NUMBERS_OF_HEADS:
                    count = vars(item).get(key)
                    if isinstance(count, int) and count % num_shards == 0:
                        setattr(item, key, count // num_shards)
                    elif isinstance(count, int) and count == one_of.get(name):
                        setattr(item, key, 1)
                if isinstance(queries := vars(item).get(QUERIES_OF_ONE), int) and name in one_of:
                    setattr(item, QUERIES_OF_ONE, queries * one_of[name] // num_shards)


def _row_shards(scheme: Context) -> tuple[int, int]:
    """In how many parts the batch is split in the residual stream, and behind a first linear layer."""
    stream = scheme.residual
    first, second = (item.num_shards(0, scheme.scheme.shape) for item in (stream, scheme.scheme.after_linear(stream)))
    return first, second


def _fill(new: nn.Module, whole: Mapping[str, Tensor]) -> nn.Module:
    """Write this rank's blocks of whole weights, in torch's layout; weights on the meta device are left for a folder's."""
    turned: Sequence[str] = getattr(new, "transposed_in_torch", ())
    for name, value in whole.items():
        p: Any = getattr(new, name)
        if not value.is_meta:
            p.data.copy_((value.t() if name in turned else value).detach()[p.sharding.slices(p.grid)])
        p.requires_grad_(value.requires_grad)
    return new


def _cut(scheme: Context, is_listed: bool, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Check global inputs, and cut those that no layer cuts."""
    named = {**{f"input {place}": argument for place, argument in enumerate(args)}, **kwargs}
    tensors = {name: item for name, item in named.items() if isinstance(item, Tensor)}
    if tensors:
        check_needs(scheme, of_batch(scheme, len(next(iter(tensors.values())))))
    cut: Callable[[str, Any], Any] = partial(_part, scheme, is_listed)
    cut_args = tuple(cut(f"input {place}", argument) for place, argument in enumerate(args))
    return cut_args, {name: cut(name, argument) for name, argument in kwargs.items()}


def _part(scheme: Context, is_listed: bool, name: str, given: Any) -> Any:
    if not isinstance(given, Tensor) or name in GLOBAL:
        return given
    grid, stream = scheme.grid, scheme.residual
    if name in OF_ROWS and given.dim() == 2:
        inner, shards = scheme.scheme.after_linear(stream), _row_shards(scheme)
        if shards[0] != shards[1]:
            if not (given == given[:1]).all() or (name == "attention_mask" and not given.all()):
                raise ConfigError(
                    f"{name} differs between rows, of which attention has 1/{shards[1]} and the residual stream 1/{shards[0]} "
                    f"(grid {describe(scheme.scheme.shape)}): models build masks for the latter. Take a grid with y = z."
                )
            return None if name == "attention_mask" else given[:1]
        return given if len(given) == 1 else given[Layout(inner.dims[0], ()).slices(given.shape, grid.shape, grid.coordinates)]
    if given.is_floating_point() and given.dim() > 1:
        ends = (stream.dims[0], *((),) * (given.dim() - 2), stream.dims[-1])
        split = Layout(
            *(axes if size > 1 else () for axes, size in zip(ends, given.shape, strict=True))
        )  # what is 1 is all ranks'
        return given[split.slices(given.shape, grid.shape, grid.coordinates)].contiguous()
    if is_listed and not name.startswith("input "):
        raise ConfigError(f"the input {name} has no known meaning for a rank's block; known: {', '.join((*GLOBAL, *OF_ROWS))}.")
    return given
