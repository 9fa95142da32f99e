"""Messages between the stages of a pipeline: words and phases, order, debug checks, MPI without buffers, and NCCL's links."""

from __future__ import annotations

import random
import re
import threading
import time
import weakref

import fake_device
import jobs
import numpy as np
import piped
import pytest

from summa3d.comm.channel import Channel, Link, links_of
from summa3d.comm.health import flight
from summa3d.comm.lanes import LARGEST
from summa3d.dry.place import DryPlace
from summa3d.errors import AgreementError, GridError, ShapeError
from summa3d.parallel.schedule import SCHEDULES, build, looped

WITHOUT_COPIES = {"MPIR_CVAR_CH4_CMA_ENABLE": "0"}
"""MPI then moves a large message only while its sender is inside MPI."""
MIB = 2**17
"""Elements of a block of 1 MiB."""
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}


@pytest.fixture
def make_channel(comm, make_grid):
    """A grid of all ranks along pp, and its channel, which is freed at the end."""
    made = []

    def make(chunks=1, homes=looped, **options):
        grid = make_grid(order=["z", "pp"], pp=comm.size, z=1, **options)
        made.append(Channel(grid["pp"], homes(comm.size, chunks)))
        return grid, made[-1]

    yield make
    for channel in made:
        channel.free()


def wanted(schedule, rank, words):
    """Phase → words and messages that a rank receives, of messages as `piped` sizes them."""
    found = {}
    for op in schedule.ops_of(rank):
        if (message := schedule.received(rank, op)) is not None:
            count = found.setdefault("forward" if op.kind == "F" else "backward", [0, 0])
            count[0] += piped.size_of(message, words, 0)
            count[1] += 1
    return found


@pytest.mark.mpi(sizes=(2, 3, 4))
@pytest.mark.parametrize("name", CHUNKS)
def test_a_pipeline_receives_its_words_each_in_the_phase_of_the_op_that_waits(comm, make_channel, name):
    """Receives are posted an op ahead: in another phase, as often as not. Headers of debug mode are not counted."""
    chunks = CHUNKS[name]
    grid, channel = make_channel(chunks, SCHEDULES[name].homes, check=name == "gpipe")
    p, m, words = comm.size, 2 * comm.size, 5
    schedule = build(name, p, m, chunks)
    with grid.ledger.watch() as moved:
        kept = piped.run(schedule, channel, grid["z"], words, random.Random(comm.rank), piped.Host())
    expected = wanted(schedule, comm.rank, words)
    first, last = int(comm.rank == 0), int(comm.rank == p - 1)
    not_sent = (first + last, first + last) if name == "zb-v" else (first, last)
    forwards, backwards = (m * (chunks - none) for none in not_sent)
    assert [expected.get(phase, [0, 0])[1] for phase in ("forward", "backward")] == [forwards, backwards]
    received = {row.phase: [row.amounts.words, row.amounts.messages] for row in moved.rows if row.collective == "receive"}
    assert received == expected and moved.words == sum(count for count, _ in expected.values())
    assert {row.axis for row in moved.rows} == {"pp"} and kept[-1] == 0
    sent = sum(schedule.sent(comm.rank, op) is not None for op in schedule.ops_of(comm.rank))
    assert sum(row.amounts.calls for row in moved.rows if row.collective == "send") == sent


@pytest.mark.mpi(sizes=(2,))
def test_two_members_never_take_a_gradient_for_an_input(comm, make_channel):
    """Of two members each is the other's next and last: only kind and stage tell messages apart, in whichever order they come."""
    _, channel = make_channel(2, check=False)
    if comm.rank == 0:
        channel.send(np.full(4, 1.0), 1, "F")
        channel.send(np.full(4, 3.0), 3, "F")
        channel.send(np.full(4, -1.0), 1, "B")
    else:
        assert channel.start_receive(np.empty(4), 1, "B").wait()[0] == -1
        assert channel.start_receive(np.empty(4), 3, "F").wait()[0] == 3
        assert channel.start_receive(np.empty(4), 1, "F").wait()[0] == 1


@pytest.mark.mpi(sizes=(2,))
def test_a_message_that_is_not_the_one_waited_for_is_told_in_debug_mode(comm, make_channel):
    _, channel = make_channel()
    sent = [((3,), "float64", 1), ((2, 3), "float64", 0), ((3,), "float32", 0)]
    told = [
        "micro-batch 1 for stage 1, 3 float64",
        "micro-batch 0 for stage 1, 2×3 float64",
        "micro-batch 0 for stage 1, 3 float32",
    ]
    for (shape, dtype, micro), text in zip(sent, told, strict=True):
        if comm.rank == 0:
            channel.send(np.ones(shape, dtype), 1, "F", micro)
        else:
            with pytest.raises(
                AgreementError, match=f"^pp 1 waits for F of {told[0].replace('1', '0', 1)}, and was sent F of {text}\\.$"
            ):
                channel.start_receive(np.empty(3), 1, "F", 0).wait()
            taken = np.empty(shape, dtype)
            (left,) = channel.axis.transports.host.receive(channel.comm, taken, 0, channel._tag(1, "F"))
            left.wait()  # so that nothing is left when the test ends
    if comm.rank == 0:
        channel.send(np.ones(3), 1, "F", 0)
    else:
        assert channel.start_receive(np.empty(3), 1, "F", 0).wait()[0] == 1


@pytest.mark.mpi(sizes=(3,))
def test_a_message_that_a_member_does_not_send_or_receive_is_refused(comm, make_channel, make_grid):
    grid, channel = make_channel()
    block = np.ones(2)
    if comm.rank == 1:
        with pytest.raises(GridError, match=r"pp 1 does not send F for stage 1. What it sends: B for stage 0, F for stage 2\."):
            channel.send(block, 1, "F")
        with pytest.raises(
            GridError, match=r"pp 1 does not receive B for stage 2. What it receives: B for stage 1, F for stage 1\."
        ):
            channel.start_receive(block, 2, "B").wait()
        with pytest.raises(ShapeError, match="C-contiguous"):
            channel.start_receive(np.ones((2, 2)).T, 1, "F")
    with pytest.raises(GridError, match=r"axis pp has the members 0 to 2; the stages' are given as \(0, 3\)"):
        Channel(grid["pp"], (0, 3))
    with pytest.raises(GridError, match=r"the stages' are given as \(0.0, 1\)"):
        Channel(grid["pp"], (0.0, 1))
    with pytest.raises(GridError, match="does not send"):
        channel.send(block, 1 + comm.rank, ["F"])
    with pytest.raises(ShapeError, match="is no array"):
        channel.send([1.0], 1, "F")
    channel.free()
    channel.free()
    for use in (channel.send, channel.start_receive):
        with pytest.raises(GridError, match="the channel of pp was freed"):
            use(block, 1, "F")


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("kept", [False, True])
def test_what_has_been_sent_is_let_go_of(comm, make_channel, kept):
    """At once where it was copied to the node's memory; a large message, which MPI copies once, when it has arrived."""
    _, channel = make_channel(check=False)
    elements = LARGEST // 8 + kept
    if comm.rank == 0:
        block = np.ones(elements)
        alive = weakref.ref(block)
        channel.send(block, 1, "F", 3)
        del block
        channel.progress()
        assert (alive() is not None) is kept
        comm.Barrier()
        channel.finish()
        assert alive() is None and channel.progress() == 0
    else:
        incoming = channel.start_receive(np.empty(elements), 1, "F", 3)
        comm.Barrier()
        assert incoming.wait()[-1] == 1 and incoming.wait() is incoming.wait()


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("check", [False, True])
def test_a_member_that_waits_says_for_what(comm, make_channel, check):
    _, channel = make_channel(check=check)
    if comm.rank == 0:
        source = channel.ranks[0]
        waits = r"waits \d+\.\d s in receive of float64 \[2\], F for stage 1"
        told = rf"{waits} from rank {source} over pp( of grid \d+)?(#\d+)? \(ranks {source}, \d\)"
        text = np.empty(200, np.uint8)  # not an object: who receives one of unknown size never sleeps
        comm.Recv(text)
        assert re.fullmatch(told, said := bytes(text).decode().rstrip()), said
        channel.send(np.ones(2), 1, "F", 3)
    else:
        incoming = channel.start_receive(np.empty(2), 1, "F", 3)
        assert flight.waiting() == ""
        waiting = threading.Thread(target=incoming.wait)
        waiting.start()
        while not (said := flight.waiting()):
            time.sleep(0.001)
        comm.Send(np.frombuffer(said.ljust(200).encode(), np.uint8), 0)
        waiting.join()
        assert flight.waiting() == ""


def test_a_dry_run_counts_messages_and_moves_none():
    place = DryPlace({"pp": 3, "z": 2}, rank=2)
    channel = Channel(place["pp"], looped(3, 2))
    with place.ledger.phase("backward"):
        out = channel.start_receive(np.ones((4, 5)), 1, "B").wait()
        channel.send(out, 0, "B")
    rows = {row.collective: (row.axis, row.phase, row.amounts.words, row.amounts.messages) for row in place.ledger.rows()}
    assert rows == {"receive": ("pp", "backward", 20, 1), "send": ("pp", "backward", 0, 0)} and channel.progress() == 0


# -- devices ------------------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(sizes=(2, 3))
@pytest.mark.parametrize("mode", fake_device.MODES)
def test_device_arrays_travel_by_pinned_copies_and_are_counted_alike(comm, make_channel, mode):
    device = fake_device.use(fake_device.Device(comm, mode, seed=comm.rank))
    grid, channel = make_channel(2, transport="pinned", device=device)
    schedule, arrays = build("interleaved", comm.size, comm.size, 2), piped.Fake(device)
    channel.open_device(arrays.full(1, 0.0))
    with grid.ledger.watch() as moved:
        piped.run(schedule, channel, grid["z"], 5, random.Random(comm.rank), arrays)
    expected = wanted(schedule, comm.rank, 5)
    received = {row.phase: [row.amounts.words, row.amounts.messages] for row in moved.rows if row.collective == "receive"}
    assert received == expected
    device.finish()


@pytest.mark.mpi(sizes=(2, 3, 4))
@pytest.mark.parametrize("name", CHUNKS)
def test_over_nccl_each_kind_neighbour_and_direction_has_a_communicator_and_a_stream(comm, make_channel, name):
    """They are opened before the first step: what opens a communicator inside one may wait for ranks that are elsewhere."""
    device = fake_device.use(fake_device.Device(comm, "concurrent", seed=comm.rank))
    chunks = CHUNKS[name]
    grid, channel = make_channel(chunks, SCHEDULES[name].homes, transport="nccl", device=device, check=False)
    arrays, p = piped.Fake(device), comm.size
    channel.open_device(arrays.full(1, 0.0))
    opened = {link: one.communicator for link, one in channel._nccl.items()}
    edges = [(rank, (rank + 1) % p) for rank in range(p if name == "interleaved" else p - 1)]
    forward = edges + [edge[::-1] for edge in edges if name == "zb-v"]
    everywhere = [("F", *edge) for edge in forward] + [("B", *edge[::-1]) for edge in forward]
    assert sorted(map(tuple, opened)) == sorted(link for link in everywhere if comm.rank in link[1:])
    neighbours = 2 if name == "interleaved" else (comm.rank > 0) + (comm.rank < p - 1)
    assert len(opened) == 2 * neighbours * (2 if name == "zb-v" else 1)
    streams, names = len(device.streams), device.nccl.names
    schedule = build(name, p, 2 * p, chunks)
    for step in range(2):
        piped.run(schedule, channel, grid["z"], 5, random.Random(step), arrays)
    device.finish()
    assert (len(device.streams), device.nccl.names) == (streams, names)
    used = [communicator.streams for communicator in opened.values()]
    assert all(len(one) == 1 for one in used) and len(set.union(*used)) == len(used)
    assert {link: one.communicator for link, one in channel._nccl.items()} == opened


def test_links_are_opened_in_one_order_by_edges_that_do_not_touch():
    order = sorted(set(links_of(looped(4, 2)).values()), key=lambda link: link.turn)
    edges = list(dict.fromkeys(frozenset(link[1:]) for link in order))
    assert edges == [{0, 1}, {2, 3}, {1, 2}, {0, 3}]
    assert order[:2] == [Link("F", 0, 1), Link("B", 1, 0)] and len(order) == 8
    assert links_of((0, 1, 1, 0)).keys() == {("F", 1), ("B", 0), ("F", 3), ("B", 2)}  # the turn of a V is no message
    assert len({link for link in links_of((0, 1, 2, 2, 1, 0)).values() if 1 in link[1:]}) == 8


@pytest.mark.mpi(sizes=(2,))
def test_device_messages_over_nccl_need_links_that_all_have_opened(comm, make_channel):
    device = fake_device.use(fake_device.Device(comm, "concurrent"))
    grid, channel = make_channel(transport="nccl", device=device, check=False)
    grid["pp"].open_device(device.put(np.ones(1)))
    with pytest.raises(GridError, match=r"call open_device\(array\) on them"):
        channel.start_receive(device.put(np.ones(3)), comm.rank, "FB"[1 - comm.rank])
    device.finish()


def test_messages_that_nccl_groups_deadlock_where_links_do_not():
    """The deadlock that the simulation predicts, on streams that run beside each other."""
    ended = {name: jobs.run([piped.__file__, name, "interleaved", "2", "4", "2", "50", "1"], 2) for name in ("nccl", "grouped")}
    assert (ended["nccl"].status, ended["nccl"].stdout) == (0, "done\n"), ended["nccl"].stderr
    assert ended["grouped"].status != 0 and "Deadlock: " in ended["grouped"].stderr


# -- MPI without buffers ------------------------------------------------------------------------------------------------------

SLOW = pytest.mark.wide
JOBS = [
    ("interleaved", 2, 4, 2, 4, False),
    ("1f1b", 2, 4, 1, 4, True),
    ("zb-v", 2, 4, 2, 4, False),
    *(
        pytest.param(name, p, m, v, ranks, ssend, marks=SLOW)
        for ssend in (False, True)
        for name, p, m, v, ranks in (
            ("gpipe", 2, 3, 1, 4),
            ("gpipe", 4, 4, 1, 4),
            ("1f1b", 2, 6, 1, 2),
            ("1f1b", 3, 2, 1, 3),
            ("1f1b", 4, 8, 1, 4),
            ("interleaved", 2, 6, 4, 4),
            ("interleaved", 3, 6, 2, 3),
            ("interleaved", 4, 8, 2, 4),
            ("zb-h1", 4, 8, 1, 4),
            ("zb-v", 4, 6, 2, 4),
        )
    ),
]


@pytest.mark.parametrize(("name", "p", "m", "v", "ranks", "ssend"), JOBS)
def test_blocks_of_mebibytes_arrive_whatever_the_ranks_wait_for(name, p, m, v, ranks, ssend):
    """Ranks are delayed at random, and those of a stage, where it has two, sleep in its sums. Ssend: nothing is buffered."""
    words = [str(word) for word in ("mpi", name, p, m, v, MIB, 2, *(["ssend"] if ssend else []))]
    ended = jobs.run([piped.__file__, *words], ranks, extra=WITHOUT_COPIES)
    assert (ended.status, ended.stdout) == (0, "done\n"), ended.stderr
