"""A thread that works beside the main one: in order, with its errors, and without a hang where it cannot begin."""

from __future__ import annotations

import threading

import pytest

from summa3d.train.checkpoint import worker
from summa3d.train.checkpoint.worker import Worker


def test_jobs_are_done_in_order_by_one_thread_and_their_errors_are_theirs() -> None:
    done: list[tuple[int, int]] = []

    def act(number: int) -> int:
        done.append((number, threading.get_ident()))
        return number // (number - 2)

    with Worker() as thread:
        futures = [thread.submit(lambda number=number: act(number)) for number in range(4)]
        assert isinstance(futures[2].exception(), ZeroDivisionError)
        assert [future.result() for future in futures[:2] + futures[3:]] == [0, -1, 3]
    assert [number for number, _ in done] == [0, 1, 2, 3] and len({thread for _, thread in done} - {threading.get_ident()}) == 1


def test_what_is_under_way_ends_and_what_waits_behind_it_is_left_out() -> None:
    begun, go, done = threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        go.wait()
        done.append("slow")

    thread = Worker()
    first, second = thread.submit(slow), thread.submit(lambda: done.append("next"))
    begun.wait()
    thread.close(wait=False)
    go.set()
    first.result()
    thread.close()
    assert done == ["slow"] and second.cancelled()


def test_a_thread_whose_memory_ends_before_it_begins_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BEGINS", 0.01)
    monkeypatch.setattr(worker._thread, "start_new_thread", lambda act, arguments: None)
    thread = Worker()
    with pytest.raises(MemoryError, match="not enough for another thread"):
        thread.submit(list)
    thread.close()  # there is none to wait for
    monkeypatch.undo()
    assert thread.submit(list).result() == []  # tried again, it may
    thread.close()
