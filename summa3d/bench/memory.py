"""The measured memory of a step: the bytes that torch saves for backward, and the peak of torch's own allocations."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")
"""Products of torch whose kernels may take scratch memory: those of 16 bits up to 0.3 MB, by the processor."""


@dataclass
class Saved:
    """The storages that a forward pass saved for backward, each counted once however many views of it were saved."""

    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The sum of the storages' bytes."""
        return sum(storage.nbytes() for storage in self.storages.values())


@contextmanager
def saved_bytes(given: Iterable[Tensor] = ()) -> Iterator[Saved]:
    """Count what the forward passes within the with-block save for backward, without the storages of `given`.

    given : parameters and inputs, which are alive in any case

    Yields the `Saved` storages, which stay alive as long as it does.
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
    """The local tensor of a torch DTensor, which a compared implementation may save; any other tensor itself."""
    with torch.no_grad():
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def peak_bytes(step: Callable[[], object], device: torch.device | None = None, scratch: bool = True) -> int:
    """The peak bytes of torch's allocator, of the host or of `device`, while `step` runs, beyond those held before.

    scratch : on the host, whether what torch's products allocate and release themselves counts; it depends on the processor

    On the host the peak comes from the allocations and releases that torch's profiler records, which include buffers inside
    kernels but no numpy arrays. What was allocated before counts neither way: the profiler knows the sizes of few such releases,
    and takes them from what an earlier profile saw at that address.
    """
    if device is not None and device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return int(torch.cuda.max_memory_allocated(device)) - before
    gc.collect()  # so that only the step's own tensors are freed while it runs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    sizes: dict[int, int] = {}
    held = peak = 0
    for _, size, address in sorted(_allocations(recorded, scratch)):
        if size > 0:
            sizes[address] = size
            held += size
            peak = max(peak, held)
        else:
            held -= sizes.pop(address, 0)
    return peak


def _allocations(recorded: profile, scratch: bool) -> Iterator[tuple[int, int, int]]:
    """Start time, signed size and address of every recorded allocation and release, but for products' own where not `scratch`."""
    results = recorded.profiler.kineto_results if recorded.profiler is not None else None
    events: list[Any] = list(results.experimental_event_tree()) if results is not None else []
    while events:
        event = events.pop()
        if _allocates(event) and (scratch or not _is_scratch(event)):
            yield event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr
        events += event.children


def _allocates(event: Any) -> bool:
    return isinstance(event.extra_fields, torch._C._profiler._ExtraFields_Allocation)


def _is_scratch(event: Any) -> bool:
    """Return whether a product allocates this memory and releases it before it ends."""
    if event.parent is None or event.parent.name not in PRODUCTS:
        return False
    same = [child for child in event.parent.children if _allocates(child) and child.extra_fields.ptr == event.extra_fields.ptr]
    return sum(item.extra_fields.alloc_size for item in same) == 0
