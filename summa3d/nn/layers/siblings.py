"""Linear layers that a module of another library gives one input: one product, which the first of them that is called makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...autograd.function import Function, once_differentiable
from ...autograd.recompute import WeightPlace, weights_in
from ..schemes.scheme import UnevenRows
from .fused_linear import FusedLinear
from .linear import Linear


class _Part(Function):
    """A copy of a part of the joined output, which code may view and change as a layer's own; backward says that it was used."""

    @staticmethod
    def forward(ctx: Any, used: set[int], place: int, part: Tensor) -> Tensor:
        ctx.used, ctx.place = used, place
        return part.clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        ctx.used.add(ctx.place)
        return None, None, grad


class _Weight(Function):
    """A weight or bias; it has a gradient, of whole blocks, where its layer's part of the output has one, and else none."""

    @staticmethod
    def forward(ctx: Any, used: set[int], place: int, weight: Tensor) -> Tensor:
        ctx.used, ctx.place = used, place
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor | None]:
        return None, None, grad if ctx.place in ctx.used else None


class _Made(NamedTuple):
    """What a product was made of, and the parts of its output that no layer has taken yet, by the layer's place."""

    x: Tensor
    weights: list[Tensor]
    versions: list[int]
    parts: dict[int, Tensor]


class SiblingLinear(Linear):
    """A linear layer whose product may be made together with those of others, while their `Siblings` lend it themselves."""

    siblings: Siblings | None = None

    def forward(
        self, x: Tensor, rows: int | UnevenRows | None = None, skip_bias_add: bool = False
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """As `Linear.forward`."""
        if self.siblings is not None and rows is None and not skip_bias_add:
            part = self.siblings.part(self, x)
            if part is not None:
                return part
        return super().forward(x, rows, skip_bias_add)


class Siblings:
    """The linear layers that `module` gives one input, as one product (`FusedLinear`) within each forward of the module.

    The layer that is called first makes it, and the others take their parts, where they are called with the same tensor, neither
    it nor their weights have been changed in between, and autograd records as it did when the module was called. Else, and where
    nobody calls the module itself, a layer is a product of its own. Parts that are not asked for cost their words, and their
    weights get no gradient. Nothing outlives the module's forward, whether it returns or raises.

    Words: those of `FusedLinear`. Workspace: its own, and a copy of the output. All ranks run the same code, and so decide alike.
    """

    def __init__(self, module: nn.Module, linears: Sequence[SiblingLinear]) -> None:
        self.joined, self.linears = FusedLinear(*linears), list(linears)
        self._made: _Made | None = None
        self._recording: object = None
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)

    def _lend(self, siblings: Siblings | None) -> None:
        self._made = None
        for linear in self.linears:
            linear.siblings = siblings

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._lend(self)
        self._recording = _recording()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._lend(None)

    def _places(self) -> list[tuple[int, WeightPlace]]:
        """The weights and biases: whose they are, and where they are stored."""
        names = [name for name, parameter in self.linears[0]._parameters.items() if parameter is not None]
        return [(index, (linear, name)) for index, linear in enumerate(self.linears) for name in names]

    def part(self, linear: Linear, x: Tensor) -> Tensor | None:
        """This layer's part of the product of x; None where it is to make a product of its own."""
        weights: list[Any] = [module._parameters[name] for _, (module, name) in self._places()]
        if not isinstance(x, Tensor) or x.dim() < 2 or any(item.is_inference() for item in (x, *weights)):
            return None  # of tensors without versions a change is not seen
        if self._recording != _recording():
            return None
        place, versions = self.linears.index(linear), [item._version for item in (x, *weights)]  # type: ignore[arg-type]
        if self._made is None:
            self._made = _Made(x, weights, versions, self._multiply(x, weights))
        made = self._made
        same = x is made.x and versions == made.versions and all(a is b for a, b in zip(weights, made.weights, strict=True))
        part = made.parts.pop(place, None) if same else None
        if not made.parts:
            self._made = None
        return part

    def _multiply(self, x: Tensor, weights: Sequence[Tensor]) -> dict[int, Tensor]:
        used, stored = set[int](), self._places()
        asked = [_Weight.apply(used, place, weight) for (place, _), weight in zip(stored, weights, strict=True)]
        with weights_in([item for _, item in stored], asked):
            return {place: _Part.apply(used, place, part) for place, part in enumerate(self.joined(x))}


def _recording() -> object:
    """The way autograd records now: whether it does, and what it calls with the tensors it keeps, as a checkpoint has it do."""
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)
