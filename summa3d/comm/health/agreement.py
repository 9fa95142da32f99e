"""Agreement of ranks: one error on all of them, calls that are compared, and messages that name the ranks of each side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress

from mpi4py import MPI

from ...errors import AgreementError
from . import flight
from .failure import check_comm


def agree_on_error(comm: MPI.Comm, error: Exception | None) -> None:
    """Collective over `comm`: if any rank passes an exception, all raise the one of the lowest such rank.

    A check that can fail on some ranks only (a file that one node cannot read) goes through here before the next collective,
    so that no rank waits for one that has left. Where not all ranks failed, the message names those that did.
    """
    errors = comm.allgather(None if error is None else _sendable(error))
    failed = [rank for rank, item in enumerate(errors) if item is not None]
    if not failed:
        return
    kind, message = next(item for item in errors if item is not None)
    if len(failed) < comm.size:
        message += f"\n  On {_ranks_in_words(failed)} of {comm.size} only."
    raise kind(message) from error


def _sendable(error: Exception) -> tuple[type[Exception], str]:
    """Reduce an exception to (class, message), the nearest base class that every rank can import and build from a message."""
    message = str(error.args[0]) if len(error.args) == 1 else str(error)
    for kind in type(error).__mro__:
        if issubclass(kind, Exception) and "<locals>" not in kind.__qualname__:
            with suppress(Exception):  # any refusal, of whatever class, means that this class takes more than a message
                kind(message)
                return kind, message
    return Exception, message


def check_agreement(comm: MPI.Comm, operation: str, facts: Mapping[str, object], problem: str | None = None) -> int:
    """Collective over `comm`: raise AgreementError on all ranks unless all passed the same operation and facts.

    The message names, for everything that differs, which ranks passed what. Facts are compared by their `repr`. problem : why
    this rank is about to refuse the call; ranks that all refuse it agree. Returns the bytes that this rank has received.
    """
    check_comm(comm, operation)
    mine = facts_of(operation, facts, problem)
    with flight.waiting_in(f"the comparison of {operation}", f"{comm.size} ranks"):
        texts = comm.allgather(json.dumps(mine))
    compare([json.loads(text) for text in texts], operation)
    return sum(map(len, texts)) - len(texts[comm.rank])


REFUSED = "refused"
"""The fact of a rank that is about to refuse the call: why."""


def facts_of(operation: str, facts: Mapping[str, object], problem: str | None = None) -> dict[str, str]:
    """Facts that ranks compare: the operation, its facts as texts, and, on a rank that is about to refuse it, why."""
    refused = {} if problem is None else {REFUSED: problem}
    return {"operation": operation, **{name: repr(fact) for name, fact in facts.items()}, **refused}


def compare(everyone: Sequence[dict[str, str]], operation: str) -> None:
    """Raise AgreementError unless all ranks' facts are equal, or all ranks refuse the call, for whatever reasons."""
    if everyone.count(everyone[0]) == len(everyone) or all(REFUSED in item for item in everyone):
        return
    everyone = [{REFUSED: "no", **item} for item in everyone]
    lines, where = [], operation
    for name in dict.fromkeys(name for item in everyone for name in item):
        ranks = [rank for rank, item in enumerate(everyone) if name in item]  # a rank that refuses the call may know less of it
        values = [everyone[rank][name] for rank in ranks]
        if len(set(values)) > 1:
            lines.append(f"  {name}: {who_passed_what(values, ranks)}")
            where = "which collective they are in" if name == "operation" else where
    raise AgreementError(f"the {len(everyone)} ranks do not agree on {where}:\n" + "\n".join(lines))


def who_passed_what(values: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """The different values, and of which ranks each is; the ranks are numbered from 0 unless they are given.

    >>> who_passed_what(["sum", "max", "sum"])
    'sum on ranks 0, 2; max on rank 1'
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in zip(range(len(values)) if ranks is None else ranks, values, strict=True):
        ranks_of.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {_ranks_in_words(ranks)}" for value, ranks in ranks_of.items())


def _ranks_in_words(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def world_ranks(comm: MPI.Comm) -> list[int]:
    """The rank in MPI_COMM_WORLD of each rank of `comm`. Raises GridError where it was freed."""
    check_comm(comm, "a communication")
    return list(comm.group.Translate_ranks(None, MPI.COMM_WORLD.group))
