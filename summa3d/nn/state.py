"""A module's whole tensors, in torch's layout: gathered from the blocks of all ranks, and written to them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..comm.grid import agree_on_call
from ..comm.health.agreement import agree_on_error
from ..errors import ShapeError
from ..layout.distribute import collect
from .copies import grid_of
from .parameter import ShardedModule, ShardedParameter


@torch.no_grad()
def full_state_dict(module: nn.Module, root_only: bool = False) -> dict[str, Tensor]:
    """The whole tensors of a module, under the names of its `state_dict`; collective over the grid.

    What torch's own module would have: a Linear's weight is [outputs, inputs], the transpose of summa3d's; tables, norms and
    biases are the same. q, k and v of a fused weight stay joined, rows ordered by head, then q, k, v, then d. Parameters and
    buffers of torch's own layers are this rank's, copied. ``module.state_dict()`` has this rank's blocks alone.

    Parameters
    ----------
    root_only : whether rank 0 alone keeps the tensors; the others get {}. They pass through every rank one at a time all the same

    Each parameter moves what `collect` does: the words of it that a rank does not own. Memory: the whole module, with root_only
    on other ranks than 0 its largest parameter. Raises GridError where no parameter belongs to a layer of summa3d, and
    AgreementError where ranks pass other modules.
    """
    grid = grid_of("full_state_dict", list(module.parameters()))
    sharded, keeps = _sharded(module), not root_only or grid.rank == 0
    state = module.state_dict()
    agree_on_call(grid, "full_state_dict", {"names": tuple(state), "root_only": bool(root_only)})
    result: dict[str, Tensor] = {}
    wholes: dict[int, Tensor] = {}
    for name, tensor in state.items():
        if name not in sharded:
            result[name] = tensor.clone()
            continue
        p, is_transposed = sharded[name]
        if id(p) not in wholes:
            whole = collect(p.detach(), grid, p.sharding.layout, p.sharding.shape)
            wholes[id(p)] = (whole.t().contiguous() if is_transposed else whole) if keeps else whole.new_empty(0)
        result[name] = wholes[id(p)]
    return result if keeps else {}


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Overwrite the parameters and buffers of a module by whole tensors in torch's layout; collective over the grid.

    Parameters
    ----------
    state : what `full_state_dict` returns of any grid, or the `state_dict` of the same module in torch's layers. On every rank;
        each takes its blocks, so that nothing moves

    Values take the dtype and the device of the parameters. Raises ShapeError, on all ranks alike and before anything is
    written, for a tensor that is missing, unknown, or of another shape; GridError where no parameter belongs to a layer of
    summa3d.
    """
    grid = grid_of("load_full_state_dict", list(module.parameters()))
    sharded, own = _sharded(module), module.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    shapes |= {name: p.sharding.shape[::-1] if turned else p.sharding.shape for name, (p, turned) in sharded.items()}
    agree_on_error(grid.comm, _problem(state, shapes, {name for name, (_, turned) in sharded.items() if turned}))
    for name, tensor in own.items():
        if name not in sharded:
            tensor.copy_(state[name])
            continue
        p, is_transposed = sharded[name]
        whole = state[name].t() if is_transposed else state[name]
        p.data.copy_(whole[p.sharding.slices(grid)])


def _sharded(module: nn.Module) -> dict[str, tuple[ShardedParameter, bool]]:
    """Name → sharded parameter, each name of a shared one too, and whether torch's layer has its transpose."""
    modules = [(prefix, item) for prefix, item in module.named_modules(remove_duplicate=False) if isinstance(item, ShardedModule)]
    turned = {f"{prefix}.{name}".removeprefix(".") for prefix, module in modules for name in module.transposed_in_torch}
    named = module.named_parameters(remove_duplicate=False)
    return {name: (p, name in turned) for name, p in named if isinstance(p, ShardedParameter)}


def _problem(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], turned: set[str]) -> ShapeError | None:
    """Error in a state, whose tensors should have these shapes."""
    missing, unknown = [name for name in shapes if name not in state], [name for name in state if name not in shapes]
    if missing or unknown:
        said = [f"{word} {', '.join(names[:3])}" for word, names in (("lacks", missing), ("has the unknown", unknown)) if names]
        return ShapeError(f"load_full_state_dict: the state {' and '.join(said)}. Its names are those of module.state_dict().")
    for name, shape in shapes.items():
        result = tuple(state[name].shape)
        if result != shape:
            order = ", which is [outputs, inputs] as in torch" if name in turned else ""
            return ShapeError(
                f"load_full_state_dict: {name} has shape {result}; the whole is {shape}{order}. "
                "A state_dict() of summa3d's layers has one rank's blocks: take full_state_dict."
            )
    return None
