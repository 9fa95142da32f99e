"""A tiny batch through the unsplit module and through its blocks: outputs of layers and all gradients, compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...comm.grid import BaseGrid, agree_on_call
from ...errors import AgreementError, ConfigError, ShapeError, Summa3dError
from ...layout.layout import Layout
from ..context import Context
from .model import stored_part

Outputs = list[tuple[str, Tensor]]
ISLANDS = 1e-5
"""The least relative difference that counts: models compute some in float32, whatever their weights are."""


class Recorded(NamedTuple):
    """The layers' outputs in the order of the pass, the result, its gradient, and those of the parameters that have one."""

    outputs: Outputs
    result: Tensor
    upstream: Tensor
    gradients: dict[str, Tensor]


@contextmanager
def _outputs(module: nn.Module, names: Mapping[str, Any]) -> Iterator[Outputs]:
    """Outputs of the layers themselves, before a hook of theirs makes more of them."""
    result: Outputs = []
    hooks = [
        module.get_submodule(name).register_forward_hook(
            lambda _, given, out, name=name: result.append((name, out.detach())), prepend=True
        )
        for name in names
    ]
    try:
        yield result
    finally:
        for hook in hooks:
            hook.remove()


def _run(module: nn.Module, inputs: Any) -> Tensor:
    """The tensor that a module returns, or its logits."""
    out = module(*inputs) if isinstance(inputs, tuple) else module(**inputs)
    result = getattr(out, "logits", out)
    if not isinstance(result, Tensor):
        raise ConfigError(
            f"the probe compares one tensor; {type(module).__name__} returns a {type(out).__name__}. Pass probe=False."
        )
    return result


def _run_together(module: nn.Module, inputs: Any, grid: BaseGrid, outputs: Outputs) -> Tensor:
    """As `_run`, on a rank's block: what the module's own code raises, on some ranks or on all, is a ConfigError on all."""
    try:
        return _run(module, inputs)
    except AgreementError as error:
        raise ConfigError(f"the probe: some ranks go on where others do not, as their blocks differ. {error}") from error
    except ShapeError as error:  # of a product, which has compared it over the ranks
        raise ConfigError(_ends(outputs, error)) from error
    except Summa3dError:
        raise
    except Exception as error:  # of the module's own code
        said = _ends(outputs, error)
        try:
            agree_on_call(grid, "the probe", {}, problem=type(error).__name__)
        except AgreementError as others:
            raise ConfigError(f"{said}\n  {others}") from error
        raise ConfigError(said) from error


def _ends(outputs: Outputs, error: Exception) -> str:
    """Message of a pass that ends with an error behind the last of these outputs."""
    behind = f" behind {outputs[-1][0]}" if outputs else ""
    return f"the probe ends on a rank's block{behind}, where code reads a size or a weight by itself: {error}"


def _gradients(module: nn.Module, result: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not named or not result.requires_grad:
        return {}
    results = torch.autograd.grad(result, list(named.values()), upstream, allow_unused=True)
    return {name: item for name, item in zip(named, results, strict=True) if item is not None}


def record(module: nn.Module, inputs: Any, layers: Mapping[str, Any]) -> Recorded:
    """Run the unsplit module, and keep the outputs of `layers`."""
    with _outputs(module, layers) as outputs:
        result = _run(module, inputs)
    generator = torch.Generator().manual_seed(len(outputs))
    upstream = torch.randn(result.shape, generator=generator).to(result.dtype)
    return Recorded(outputs, result.detach(), upstream, _gradients(module, result, upstream))


def compare(
    module: nn.Module, scheme: Context, inputs: Any, wanted: Recorded, layouts: Mapping[str, Layout], last: Layout
) -> None:
    """Raise ConfigError on all ranks, naming the first layer or parameter that differs; collective.

    So it does for what the module's own code raises.

    layouts : of the layers' outputs; last : of the result
    """
    grid = scheme.grid
    with _outputs(module, layouts) as outputs:
        result = _run_together(module, inputs, grid, outputs)
    pairs = [
        (f"the output of {name}", entry, _cut(scheme, whole, layouts[name]))
        for (name, entry), (_, whole) in zip(outputs, wanted.outputs, strict=True)
    ]
    _check(module, grid, [*pairs, ("the result", result.detach(), _cut(scheme, wanted.result, last))])
    results = _gradients(module, result, _cut(scheme, wanted.upstream, last))
    pairs = []
    for name, item in results.items():
        part = stored_part(module, name)
        whole = wanted.gradients.get(part.name)
        if whole is None:
            pairs.append((f"the gradient of {part.name}", item, torch.zeros_like(item)))
        else:
            block = whole[part.slices] if part.slices else whole
            pairs.append((f"the gradient of {part.name}", item, block.t() if part.is_turned else block))
    _check(module, grid, pairs)


def _check(module: nn.Module, grid: BaseGrid, pairs: Sequence[tuple[str, Tensor, Tensor]]) -> None:
    wrong = next((index for index, (_, pair, whole) in enumerate(pairs) if not _close(pair, whole)), len(pairs))
    first = min(grid.comm.allgather(wrong))
    if first < len(pairs):
        what = pairs[first][0]
        raise ConfigError(f"the probe differs from the unsplit module: first in {what}{_kind(module, what)}.")


def _kind(module: nn.Module, what: str) -> str:
    name = what.rpartition(" ")[2]
    return next((f", a {type(item).__name__}" for key, item in module.named_modules() if key == name), "")


def _cut(scheme: Context, whole: Tensor, layout: Layout) -> Tensor:
    """This rank's block of an activation, of any number of dims: its first is split as rows, its last as columns."""
    own = Layout(layout.dims[0], *((),) * (whole.dim() - 2), layout.dims[-1])
    return whole[own.slices(whole.shape, scheme.grid.shape, scheme.grid.coordinates)].contiguous()


def _close(mine: Tensor, whole: Tensor) -> bool:
    if mine.shape != whole.shape:
        return False
    if not mine.numel():
        return True
    close = max(torch.finfo(mine.dtype).eps ** 0.5, ISLANDS)
    return bool((mine - whole).abs().max() <= close * whole.abs().max().clamp(min=1e-3))
