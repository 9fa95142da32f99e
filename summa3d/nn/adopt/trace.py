"""Where each parameter of a module is used: one pass of the unsplit module on meta tensors, with a place on every tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ...errors import ConfigError, Summa3dError
from .roles import FIRST, HEAD, SECOND, owner_of

IDS, STREAM, FLAT, HEADS, LOGITS = "ids", "the residual stream", "between two linears", "heads", "logits"
"""Places of a tensor. FLAT is a first linear's output as it is, whose last dim is split; HEADS what was reshaped of it."""
SPLIT = (STREAM, FLAT, HEADS, LOGITS)
RESHAPES = {"view", "reshape", "unflatten", "transpose", "permute", "movedim", "flatten", "unsqueeze", "unbind"}
REDUCTIONS = {"mean", "sum", "softmax", "log_softmax", "norm", "var", "std", "amax", "max", "argmax", "topk", "cumsum", "sort"}
REDUCTIONS |= {"layer_norm", "rms_norm", "normalize", "group_norm", "logsumexp", "matmul", "__matmul__", "bmm", "einsum"}
REDUCTIONS |= {"prod", "cumprod", "logcumsumexp", "median"}
ANSWERS: dict[str, Any] = {"__bool__": True, "item": 0, "tolist": []}
"""What a tensor without data says: there is no padding, and sequences are not packed."""


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module without children calls itself a norm."""
    return "norm" in type(module).__name__.lower() and next(module.children(), None) is None


class Unknown(TorchFunctionMode):
    """Within it, tensors without data say what a batch without padding says."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ANSWERS and isinstance(args[0], Tensor) and args[0].is_meta:
            return ANSWERS[name]
        return func(*args, **(kwargs or {}))


class _Call(NamedTuple):
    """A module's call: its name, whether it is a norm, and the number of the call."""

    name: str
    is_norm: bool
    number: int


@dataclass
class Uses:
    """What the pass found.

    Attributes
    ----------
    places : parameter's name → the places where it was used
    norms : module's name → the place and the last dim of what it normalised
    tables : module's name → whether it embeds the ids (else positions)
    siblings : modules' names, each with the first linear layers that it calls once each, on the same tensor
    heads : name of a first linear layer, or of a norm of all its columns → the heads that its output is reshaped into: how many,
        and of how many elements; several where it is more than one of q, k and v
    result : the place of the one tensor that the module returns, or of its logits
    """

    places: dict[str, set[str]] = field(default_factory=dict)
    norms: dict[str, tuple[str, int]] = field(default_factory=dict)
    tables: dict[str, bool] = field(default_factory=dict)
    siblings: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    heads: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    result: str | None = None


class _Trace(TorchFunctionMode):
    def __init__(self, names: Mapping[int, str], roles: Mapping[str, str]) -> None:
        super().__init__()
        self.names, self.roles, self.uses = names, roles, Uses()
        self.inside: list[_Call] = []
        self.given: dict[tuple[int, int], tuple[str, Tensor, list[str]]] = {}
        """The number of a module's call, a tensor → the module, that tensor, and the first linear layers that it gave it to."""

    def refuse(self, what: str, error: Exception | None = None) -> NoReturn:
        where = next((item.name for item in reversed(self.inside) if item.name), "the module")
        raise ConfigError(f"{where}: {what}") from error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        tensors = list(tensors_of((args, kwargs)))
        if name in ANSWERS and tensors and tensors[0].is_meta:
            if (read := getattr(tensors[0], "_place", None)) in SPLIT:
                self.refuse(f"its code decides by a value ({name}) of {read}, of which ranks have other blocks.")
            return ANSWERS[name]
        out = func(*args, **kwargs)
        outs: list[Any] = list(tensors_of(out)) or (tensors[:1] if name == "__setitem__" else [])
        if not outs or not tensors:
            return out
        place: str | None
        layer = frozenset[str]()
        used = [self.names[id(tensor)] for tensor in tensors if id(tensor) in self.names]
        if func is functional.linear and used:
            layer, used = frozenset({owner_of(used[0])}), []
            place = self._linear(args, kwargs, *layer)
        elif func is functional.embedding and used:
            place, used = self._embedding(args, kwargs, used[0], outs[0]), []
        else:
            place = self._joined(tensors, name)
            if not any(entry.is_norm for entry in self.inside):
                self._check(name, place, args, kwargs, tensors)
        makers = frozenset[str]().union(*(getattr(tensor, "_by", ()) for tensor in tensors)) or layer
        self._note_heads(tensors[0], outs[0], place, makers)
        derived = frozenset(used).union(*(getattr(tensor, "_of", ()) for tensor in tensors))
        if place in SPLIT:
            for item in derived:
                self.uses.places.setdefault(item, set()).add(place)
        for item in outs:
            item._place, item._of = place, frozenset() if place in SPLIT else derived
            item._by = makers if place == FLAT else frozenset()
        return out

    def _note_heads(self, x: Tensor, out: Tensor, place: str | None, makers: frozenset[str]) -> None:
        """Note the heads into which the last dim of one module's output is cut."""
        is_cut = getattr(x, "_place", None) == FLAT and place == HEADS and out.dim() == x.dim() + 1
        if is_cut and out.shape[:-2] == x.shape[:-1] and len(makers) == 1:
            self.uses.heads.setdefault(next(iter(makers)), set()).add((out.shape[-2], out.shape[-1]))

    def _joined(self, tensors: list[Tensor], name: str) -> str | None:
        """The place of what is computed of these tensors."""
        places = {getattr(tensor, "_place", None) for tensor in tensors}
        split = {place for place in places if place in SPLIT}
        if split == {FLAT, HEADS}:
            split = {HEADS}
        if len(split) > 1:
            self.refuse(
                f"{name} joins {' with '.join(sorted(split))}, which are split in different ways. "
                "Does the plan name the linear layer between them?"
            )
        if split == {FLAT} and name in RESHAPES:
            return HEADS
        return next(iter(split), IDS if IDS in places else None)

    def _linear(self, args: Any, kwargs: Any, layer: str) -> str:
        x = args[0] if args else kwargs["input"]
        place = getattr(x, "_place", None)
        role = self.roles.get(layer)
        if role is None:
            self.refuse(
                f"the linear layer {layer} has no role in the plan. Add it as first (leaves the stream) or second (returns)."
            )
        wanted = (FLAT, HEADS) if role == SECOND else (STREAM,)
        if place not in wanted:
            self.refuse(
                f"{layer} is {'the' if role == HEAD else 'a'} {role} linear layer, whose input is {' or '.join(wanted)}; "
                f"it is given {place or 'what no layer made'}."
            )
        if role == FIRST and len(self.inside) > 1:
            self.given.setdefault((self.inside[-2].number, id(x)), (self.inside[-2].name, x, []))[2].append(layer)
        return {FIRST: FLAT, SECOND: STREAM, HEAD: LOGITS}[role]

    def siblings(self) -> list[tuple[str, tuple[str, ...]]]:
        """As in `Uses`; not those that other calls, or other inputs, have found in other company."""
        groups = dict.fromkeys((owner, tuple(layers)) for owner, _, layers in self.given.values())
        times = Counter(layer for _, layers in groups for layer in layers)
        return [group for group in groups if len(group[1]) > 1 and all(times[layer] == 1 for layer in group[1])]

    def _embedding(self, args: Any, kwargs: Any, weight: str, out: Tensor) -> str:
        x = args[0] if args else kwargs["input"]
        of_ids = getattr(x, "_place", None) == IDS
        if not of_ids and not (x.dim() == 1 or x.shape[0] == 1):
            self.refuse(f"{weight} is read at indices that are neither ids nor the positions of one sequence.")
        self.uses.tables[owner_of(weight)] = of_ids
        return STREAM

    def _check(self, name: str, place: str | None, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        """Refuse what a rank cannot compute of its block alone."""
        if name == "dropout" and kwargs.get("p", args[1] if len(args) > 1 else 0.5) > 0 and place in SPLIT:
            self.refuse("dropout with p > 0 draws from a rank's own generator. Set its p to 0.")
        if name == "scaled_dot_product_attention" and kwargs.get("dropout_p", args[4] if len(args) > 4 else 0):
            self.refuse("attention with dropout draws from a rank's own generator. Set attention_dropout to 0.")
        if name not in REDUCTIONS or place not in (STREAM, FLAT, LOGITS):
            return
        dim = kwargs.get("dim", args[1] if len(args) > 1 and not isinstance(args[1], Tensor) else None)
        ndim = tensors[0].dim()
        dims = dim if isinstance(dim, (tuple, list)) else (dim,)
        if any(reduced in (None, -1, ndim - 1) for reduced in dims):
            self.refuse(f"{name} reduces {place} over its last dim, which axes split: only norms and linear layers can.")


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and tables."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(tuple(value.values()))


def trace(module: nn.Module, roles: Mapping[str, str], inputs: Mapping[str, Tensor] | tuple[Tensor, ...]) -> Uses:
    """Run the unsplit module once, on meta tensors and in training mode, and return where its parameters are used.

    roles : name of a linear layer → FIRST, SECOND or HEAD
    inputs : keywords, or positional; integers are ids, floating-point tensors the residual stream

    No data is touched, nothing moves. Raises ConfigError naming the layer for what a rank cannot compute of its block alone: a
    linear layer without a role, tensors joined that are split in different ways, a reduction over a split dim, a decision by a
    value, dropout; and for what its own code raises.
    """
    metas = {name: parameter.detach().to("meta") for name, parameter in (*module.named_parameters(), *module.named_buffers())}
    parameters = {name for name, _ in module.named_parameters()}
    names = {id(meta): name for name, meta in metas.items() if name in parameters}
    modules = {id(entry): name for name, entry in module.named_modules()}
    tracer, training, numbers = _Trace(names, roles), {entry: entry.training for entry in module.modules()}, count()

    def enter(called: nn.Module, given: Any) -> None:
        is_a_norm = is_norm(called)
        tracer.inside.append(_Call(modules.get(id(called), ""), is_a_norm, next(numbers)))
        if is_a_norm and given and getattr(given[0], "_place", None) in SPLIT:
            tracer.uses.norms[modules[id(called)]] = given[0]._place, given[0].shape[-1]

    def leave(called: nn.Module, given: Any, out: Any) -> None:
        if tracer.inside.pop().is_norm and getattr(out, "_place", None) == FLAT:
            out._by = frozenset({modules[id(called)]})

    args = inputs if isinstance(inputs, tuple) else ()
    kwargs = {} if isinstance(inputs, tuple) else dict(inputs)
    args, kwargs = tuple(_placed(argument) for argument in args), {name: _placed(entry) for name, entry in kwargs.items()}
    hooks: list[Any] = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        with torch.no_grad(), tracer:
            out = _call(module.train(), metas, args, kwargs)
            tracer.uses.siblings = tracer.siblings()
            tracer.uses.result = getattr(getattr(out, "logits", out), "_place", None)
    except Summa3dError:
        raise
    except Exception as error:  # of the module's own code
        tracer.refuse(f"its own code raises in a pass without data: {type(error).__name__}: {error}", error)
    finally:
        for hook in hooks:
            hook.remove()
        for item, mode in training.items():
            item.training = mode
    return tracer.uses


_call: Callable[..., Any] = torch.func.functional_call


def _placed(given: Any) -> Any:
    if not isinstance(given, Tensor):
        return given
    meta: Any = given.detach().to("meta")
    meta._place = STREAM if given.is_floating_point() else IDS
    return meta
