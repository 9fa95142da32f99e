# What a step really holds: the bytes that torch keeps for backward, and the peak of torch's own account of its allocations.
# Imports torch only. Next: dry/storages.py, the same of a dry run.
from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


@dataclass
class Saved:
    """The storages that a forward pass saved for backward: each counted once, however many views of it were saved."""

    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


@contextmanager
def saved_bytes(given: Iterable[Tensor] = ()) -> Iterator[Saved]:
    """Yield an account of what the block's forward passes save for backward, without the storages `given`.

    `given` are the parameters and the inputs, which live anyway. The account holds what it counts until it is dropped.
    """
    saved = Saved()
    outside = {_local(tensor).untyped_storage().data_ptr() for tensor in given}

    def pack(tensor: Tensor) -> Tensor:
        storage = _local(tensor).untyped_storage()
        if storage.data_ptr() not in outside:
            saved.storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _local(tensor: Tensor) -> Tensor:
    """The part that lies here: of one of torch's own distributed tensors, which a peer may save, its local tensor."""
    with torch.no_grad():
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def peak_bytes(step: Callable[[], object], device: torch.device | None = None) -> int:
    """The most that torch's allocator, of the host or of `device`, held at once while `step` ran, beyond what it held before.

    The host's is from the allocator's own reports to torch's profiler: every tensor and every buffer inside a kernel, freed when
    it was freed. numpy's arrays are not among them.
    """
    if device is not None and device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return int(torch.cuda.max_memory_allocated(device)) - before
    gc.collect()  # what is freed meanwhile shall be the step's own
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    held = peak = 0
    for _, size in sorted(_allocations(recorded)):
        held += size
        peak = max(peak, held)
    return peak


def _allocations(recorded: profile) -> Iterator[tuple[int, int]]:
    """Start time and signed size of every allocation and release."""
    results = recorded.profiler.kineto_results if recorded.profiler is not None else None
    events = list(results.experimental_event_tree()) if results is not None else []
    while events:
        event = events.pop()
        if isinstance(event.extra_fields, torch._C._profiler._ExtraFields_Allocation):
            yield event.start_time_ns, event.extra_fields.alloc_size
        events += event.children
