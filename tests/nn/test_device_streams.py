"""Which stream a collective is ordered by: the one that is current on the thread that asks, be it the caller's or autograd's."""

from __future__ import annotations

import sys
import threading
import types

import pretended
import pytest
import torch
from scheme_table import GPT2, rows_for, tokens_and_labels

from summa3d.comm.device.cupy import CupyBackend
from summa3d.nn import GPT, scheme
from summa3d.train.device import on_device


def in_another_thread(act):
    """`act` on a thread of its own, as autograd's engine has one for each device; returns the thread's number."""
    failed: list[BaseException] = []

    def run():
        try:
            act()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return thread.ident


@pytest.mark.mpi(sizes=(4,))
def test_what_backward_communicates_is_ordered_by_the_stream_of_its_own_thread(comm, make_grid, kernel_libraries, monkeypatch):
    with pretended.pretended(monkeypatch, kernel_libraries) as (device, backends):
        on_grid = scheme("cuboid", make_grid(x=2, z=2, node_memory=False, transport="nccl"))
        with pretended.CUDA:
            model = GPT(GPT2, on_grid, torch.float64)
        tokens, labels = tokens_and_labels(GPT2, rows_for(on_grid), GPT2.sequence)
        loss = model(**on_device({"tokens": tokens, "labels": labels}, pretended.CUDA))
        before = {id(backend): len(backend.waited) for backend in backends}

        def backward():
            with device:
                loss.backward()

        thread = in_another_thread(backward)
    moved = 0
    for backend in backends:
        callers = {stream: number for number, stream in backend.streams_of.items()}
        first = before.get(id(backend), 0)
        for wanted, pairs in ((threading.get_ident(), backend.waited[:first]), (thread, backend.waited[first:])):
            assert len(pairs) % 2 == 0
            for one, other in pairs:  # the transport's stream waits for the caller's, and the caller's for it
                assert [callers[stream] for stream in (one, other) if stream in callers] == [wanted]
        moved += len(backend.waited) - first
    assert moved > 0 and sum(before.values()) > 0


def test_the_real_device_takes_torchs_stream_of_the_calling_thread(monkeypatch):
    streams = threading.local()
    cuda = types.SimpleNamespace(Stream=types.SimpleNamespace(from_external=lambda stream: stream.__cuda_stream__()[1]))
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.SimpleNamespace(nccl=types.SimpleNamespace(available=False)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=streams.now))
    backend, found = CupyBackend(), {}
    tensor = types.SimpleNamespace(device=torch.device("cuda", 3))
    monkeypatch.setattr("summa3d.comm.device.cupy.is_torch", lambda array: True)

    def ask(stream):
        streams.now = stream
        found[stream] = backend.current(tensor)

    ask(5)
    in_another_thread(lambda: ask(6))
    ask(7)
    assert found == {5: 5, 6: 6, 7: 7}
