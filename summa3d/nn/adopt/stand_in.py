"""What a module gets in place of the residual stream where it counts rows by it, and these are others than its heads' rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError

PROPERTIES: tuple[Any, ...] = (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.requires_grad, Tensor.layout)
READ = frozenset(
    (*(item.__get__ for item in PROPERTIES), Tensor.size, Tensor.dim, Tensor.__len__, Tensor.is_floating_point),
)
"""What may be asked of a stand-in."""


class StandIn(Tensor):
    """The shape that a block of the residual stream would have with the rows of heads; `stream` is that block.

    Only linear layers that leave the residual stream take it, for `stream`. Any other use raises ConfigError.
    """

    stream: Tensor

    @classmethod
    def of(cls, stream: Tensor, rows: int) -> StandIn:
        """Of as many rows; holds no memory."""
        result: StandIn = cls._make_subclass(cls, stream.detach().new_empty(1).expand(rows, *stream.shape[1:]))
        result.stream = stream
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in READ:
            raise ConfigError(
                f"attention computes {getattr(func, '__name__', func)} of the residual stream by itself, whose rows are split "
                "otherwise than its heads' here. Take a grid with y = z."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class StandsIn:
    """Hooks that give a module stand-ins of `heads` rows for each `stream` rows of the residual stream."""

    def __init__(self, stream: int, heads: int) -> None:
        self.stream, self.heads = stream, heads

    def apply(self, module: nn.Module, linears: list[nn.Module]) -> None:
        """Register them on a module, and on its linear layers that leave the stream."""
        module.register_forward_pre_hook(self._give, with_kwargs=True)
        for linear in linears:
            linear.register_forward_pre_hook(_take)

    def _give(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        stream = next((argument for argument in (*args, *kwargs.values()) if _is_stream(argument)), None)
        if stream is None:
            return args, kwargs
        rows = len(stream) * self.stream // self.heads

        def given(tensor: Any) -> Any:
            if isinstance(tensor, tuple):
                return tuple(map(given, tensor))
            if tensor is stream:
                return StandIn.of(tensor, rows)
            return tensor[:1] if isinstance(tensor, Tensor) and tensor.dim() > 1 and len(tensor) == len(stream) else tensor

        return tuple(map(given, args)), {name: given(item) for name, item in kwargs.items()}


def _is_stream(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dim() == 3 and tensor.is_floating_point()


def _take(module: nn.Module, args: Any) -> Any:
    return tuple(argument.stream if isinstance(argument, StandIn) else argument for argument in args)
