"""A causal language model of Transformers in cells: what it does before its layers, in each, and behind them.

Its own forward runs each time, with the layers in it replaced for the time being by what hands a stream on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from .trace import Unknown, tensors_of

STREAM = "hidden_states"
KEPT_CALLS = 4
"""Shapes of batches whose calls are kept: those of training, of evaluation, and of the texts that are continued."""


class LayerCall(NamedTuple):
    """What the model's forward gives a layer beside the residual stream: rotary tables, masks, and flags."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Reached(Exception):
    """The first, or the last, layer is reached: the rest of the forward is not wanted."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


Stub = Callable[[int, Tensor, LayerCall], Tensor]
"""Runs in the place of a layer: its number, the stream that it is given, and all else → the stream that it hands on."""


class ForwardCells:
    """The cells of a model, whose `layers` are called one after the other on the residual stream, and on nothing else."""

    def __init__(self, module: Any, layers: Sequence[nn.Module]) -> None:
        self.module, self.layers = module, list(layers)
        self._calls: dict[object, list[LayerCall]] = {}
        self._forward: Callable[..., Any] = module.forward

    def enter(self, ids: Tensor) -> Tensor:
        """The residual stream before the first layer, for global ids."""

        def reached(place: int, x: Tensor, call: LayerCall) -> NoReturn:
            raise _Reached(x)

        try:
            self._run(reached, input_ids=ids)
        except _Reached as result:
            return result.stream
        raise self._refusal("does not call the layers that its pipeline plan names")

    def calls(self, shape: Sequence[int], like: Tensor) -> list[LayerCall]:
        """Each layer's inputs beside a stream of this rank's block `shape`, in the dtype and on the device of `like`.

        They depend on the block's shape alone, for there are no masks; those of the last few shapes are kept. Moves nothing.
        """
        key = tuple(shape), like.dtype, like.device
        if key not in self._calls:
            if len(self._calls) == KEPT_CALLS:
                del self._calls[next(iter(self._calls))]
            with torch.no_grad():
                self._calls[key] = self._recorded(torch.zeros(shape, dtype=like.dtype, device=like.device))
        return self._calls[key]

    def leave(self, x: Tensor, **options: Any) -> Tensor:
        """The logits of the stream x behind the last layer: this rank's block."""
        logits: Tensor = self._run(lambda place, given, call: x, inputs_embeds=x.detach(), **options).logits
        return logits

    def check(self, width: int) -> None:
        """Raise ConfigError where the unsplit model's forward does more between its cells than hand a stream of `width` on.

        Runs on meta tensors: no data is touched, nothing moves.
        """
        metas = {
            name: parameter.detach().to("meta")
            for name, parameter in (*self.module.named_parameters(), *self.module.named_buffers())
        }
        self._forward = lambda **inputs: torch.func.functional_call(self.module, metas, (), inputs)
        try:
            start = torch.empty(2, 3, width, dtype=next(self.module.parameters()).dtype, device="meta")
            calls, handed = self._recorded(start.requires_grad_()), start.detach()
            if any(item.requires_grad for call in calls for item in tensors_of(call)):
                raise self._refusal("gives its layers something of the embedded tokens beside the stream")
            if self._run(lambda place, given, call: handed, inputs_embeds=start).logits.requires_grad:
                raise self._refusal("reads the embedded tokens again behind its layers")
        finally:
            self._forward = self.module.forward

    def _recorded(self, start: Tensor) -> list[LayerCall]:
        calls: list[LayerCall] = []
        handed: list[Tensor] = []

        def record(place: int, x: Tensor, call: LayerCall) -> Tensor:
            if place != len(calls) or (handed and x is not handed[-1]):
                raise self._refusal(f"does more between layers than hand the stream on, before layer {place}")
            calls.append(call)
            if len(calls) == len(self.layers):
                raise _Reached(x)
            handed.append(x)
            return x

        try:
            self._run(record, inputs_embeds=start)
        except _Reached:
            return calls
        raise self._refusal(f"calls {len(calls)} of its {len(self.layers)} layers")

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(f"{type(self.module).__name__} {what}, so that it does not run in cells, as training needs it.")

    def _run(self, stub: Stub, **inputs: Any) -> Any:
        with self._replaced(stub), ExitStack() as stack:
            if any(item.is_meta for item in tensors_of(inputs)):
                stack.enter_context(Unknown())
            return self._forward(**inputs, use_cache=False)

    @contextmanager
    def _replaced(self, stub: Stub) -> Iterator[None]:
        def call(place: int, *args: Any, **kwargs: Any) -> Tensor:
            if args:
                return stub(place, args[0], LayerCall(args[1:], kwargs))
            return stub(place, kwargs[STREAM], LayerCall((), {name: item for name, item in kwargs.items() if name != STREAM}))

        for place, layer in enumerate(self.layers):
            layer.forward = partial(call, place)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward
