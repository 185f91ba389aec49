"""The question that stays open: a halt wakes whoever blocks, and orders count once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.worker_commands import Begin, End
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.elastic.worker import commands as orders_module
from holdfast.elastic.worker.commands import CommandClient, HaltedError
from holdfast.elastic.worker.stuck_threads import ThreadId, ThreadWatcher, is_any_stuck
from holdfast.errors import PeerLostError
from holdfast.layout import Layout, place_layout
from holdfast.parallel.comm.transport import PeerGroup, exchange
from holdfast.parallel.torch_compat import Work
from holdfast.policy.recovery.survivors import HeldState
from holdfast.wire.http.client import Client, UnreachableError
from tests.support.control_server import SECRET, Desk, controlling
from tests.support.marks import in_campaign
from tests.support.ranks import DEADLINE_S, RankContext, ranks, wait_until


@contextmanager
def asking() -> Iterator[tuple[CommandClient, Desk]]:
    desk = Desk()
    with controlling(desk=desk) as control:
        orders = CommandClient(control.address, SECRET, 7)
        orders.start()
        wait_until(lambda: 7 in desk.asked, what="the first question")
        yield orders, desk
        orders.close()


def _begin(generation: int, **more: Any) -> dict[str, Any]:
    topology = place_layout(Layout(), generation, ("node0",))
    boot = WorkerSpec({}, topology, generation, 0, 1, "h:1", "", "", "", None, 0, "", "")
    told = {"topology": topology.to_json(), "step": 3}
    return {"kind": "begin", "boot": boot.to_json(), "came_from": [None], "before": told, **more}


def _halt(generation: int, inside: bool = True) -> dict[str, Any]:
    return {"kind": "halt", "inside": inside, "generation": generation}


def test_a_halt_wakes_who_blocks_and_one_of_the_past_does_not() -> None:
    woken: list[bool] = []
    wake = threading.Event()

    def interrupt(inside: bool) -> None:
        woken.append(inside)
        wake.set()

    with asking() as (orders, desk), orders.interruptible(2, interrupt):
        desk.give(7, _halt(1))
        wait_until(lambda: orders.is_halted(1), what="the older halt")
        assert not orders.is_halted(2)
        assert woken == []
        desk.give(7, _halt(2, inside=False))
        assert wake.wait(DEADLINE_S)
        # Who does not come back is woken by all means.
        wait_until(lambda: woken == [False, True], what="the second attempt")
    with pytest.raises(HaltedError):
        orders.check_halted(2)
    with pytest.raises(HaltedError), orders.interruptible(2, interrupt):
        pytest.fail("a generation that is over was entered")
    orders.check_halted(3)


@pytest.mark.slow
def test_who_is_woken_slowly_is_woken_once_more_all_the_same() -> None:
    """The first attempt lasts until after the second one is due, and was not enough."""
    woken: list[bool] = []

    def interrupt(inside: bool) -> None:
        woken.append(inside)
        threading.Event().wait(0.0 if len(woken) > 1 else 3.0)

    with asking() as (orders, desk), orders.interruptible(2, interrupt):
        desk.give(7, _halt(2, inside=False))
        wait_until(lambda: woken == [False, True], what="the second attempt")


def test_who_comes_back_while_it_is_woken_is_not_woken_once_more() -> None:
    """It waits for the end of a slow attempt: what lies inside its replica is not given up."""
    woken: list[bool] = []
    wake = threading.Event()

    def interrupt(inside: bool) -> None:
        woken.append(inside)
        wake.set()
        threading.Event().wait(2.5)

    with asking() as (orders, desk):
        with orders.interruptible(2, interrupt):
            desk.give(7, _halt(2, inside=False))
            assert wake.wait(DEADLINE_S)
        with orders.interruptible(3, interrupt):
            threading.Event().wait(2.0)
    assert woken == [False]


def test_what_is_held_is_told_at_once_and_orders_count_once() -> None:
    with asking() as (orders, desk):
        desk.give(7, _begin(2))
        first = orders.wait_for_command(None)
        assert isinstance(first, Begin)
        assert (first.spec.generation, first.came_from) == (2, (None,))
        assert first.previous is not None
        assert first.previous.step == 3
        answer: list[Begin | End] = []
        held = HeldState(2, 0, 5, None, False, "peer", "somebody is gone", (2, 0))
        waiting = threading.Thread(target=lambda: answer.append(orders.wait_for_command(held)))
        waiting.start()
        wait_until(lambda: 7 in desk.held, what="what is held")
        assert desk.held[7]["applied"] == 5
        assert answer == []
        desk.give(7, {"kind": "end"})
        waiting.join(DEADLINE_S)
        assert answer == [End()]


def test_a_halt_takes_back_what_was_ordered_before_it() -> None:
    with asking() as (orders, desk):
        desk.give(7, _begin(2))
        wait_until(lambda: orders.is_halted(1), what="the order")
        desk.give(7, _halt(2))
        wait_until(lambda: orders.is_halted(2), what="the halt")
        desk.give(7, _begin(3))
        found = orders.wait_for_command(None)
        assert isinstance(found, Begin)
        assert found.spec.generation == 3


def test_a_client_that_is_aborted_ends_what_waits() -> None:
    desk, errors = Desk(), list[BaseException]()
    with controlling(desk=desk) as control:
        client = Client(control.address, SECRET)

        def ask() -> None:
            try:
                client.post("/orders", {"process": 9, "seen": 0, "held": None}, DEADLINE_S)
            except UnreachableError as error:
                errors.append(error)

        waiting = threading.Thread(target=ask)
        waiting.start()
        wait_until(lambda: 9 in desk.asked, what="the question")
        client.abort()
        waiting.join(DEADLINE_S)
        assert len(errors) == 1
        with pytest.raises(UnreachableError):
            client.post("/orders", {"process": 9, "seen": 0, "held": None}, DEADLINE_S)


@ranks(2, dies={0: exit_codes.PEER_LOST, 1: "SIGKILL"})
def test_who_waits_for_the_rest_of_a_message_that_never_comes_ends(rank: RankContext) -> None:
    peers = PeerGroup(rank.store(), "inside", rank.rank, 2, seconds=600)
    receive, come = peers.receive, list[torch.Tensor]()
    lengths = [1, 16 << 20]  # 128 MB

    def seen(tensor: torch.Tensor, peer: int, tag: int) -> Work:
        come.append(tensor.zero_())
        return receive(tensor, peer, tag)

    def broken_off(desk: Desk) -> None:
        wait_until(lambda: come and bool(come[0][0] != 0), what="the first bytes")
        rank.kill(1)
        assert come[0][-1] == 0, "it came whole: no test"
        desk.give(7, _halt(2))

    peers.receive = seen  # type: ignore[method-assign]
    record = torch.ones(lengths[rank.rank], dtype=torch.int64)
    if rank.rank == 1:
        exchange(peers, record, lengths, 1)
        rank.wait_mark("never", 0)

    with (
        asking() as (orders, desk),
        orders.interruptible(2, lambda _: peers.abort(), exits_if_stuck=True),
    ):
        threading.Thread(target=broken_off, args=(desk,)).start()
        exchange(peers, record, lengths, 1)


@ranks(2, dies={0: exit_codes.PEER_LOST})
def test_who_cannot_even_be_woken_ends(rank: RankContext) -> None:
    """What is to wake the training thread waits in gloo itself, and so does who leaves."""
    peers = PeerGroup(rank.store(), "inside", rank.rank, 2, seconds=600)
    if rank.rank == 1:
        rank.wait_mark("waits", 0)
        with pytest.raises(PeerLostError):
            exchange(peers, torch.ones(1, dtype=torch.int64), [1, 1], 2)
        return
    wakes = threading.Event()

    def interrupt(_: bool) -> None:
        wakes.set()
        exchange(peers, torch.ones(1, dtype=torch.int64), [1, 1], 1)

    with asking() as (orders, desk), orders.interruptible(2, interrupt, exits_if_stuck=True):
        desk.give(7, _halt(2))
        assert wakes.wait(DEADLINE_S)
        rank.mark("waits")


@ranks(2, dies={0: exit_codes.PEER_LOST})
@pytest.mark.slow
def test_who_gets_stuck_as_it_wakes_once_more_is_seen(rank: RankContext) -> None:
    """The first attempt is over at once and in vain; the second one waits in gloo itself."""
    peers = PeerGroup(rank.store(), "inside", rank.rank, 2, seconds=600)
    if rank.rank == 1:
        rank.wait_mark("waits", 0)
        with pytest.raises(PeerLostError):
            exchange(peers, torch.ones(1, dtype=torch.int64), [1, 1], 2)
        return
    attempts: list[bool] = []

    def interrupt(inside: bool) -> None:
        attempts.append(inside)
        if len(attempts) == 2:
            rank.mark("waits")
            exchange(peers, torch.ones(1, dtype=torch.int64), [1, 1], 1)

    with asking() as (orders, desk), orders.interruptible(2, interrupt, exits_if_stuck=True):
        desk.give(7, _halt(2, inside=False))
        rank.wait_mark("never", 1)


@ranks(2)
@pytest.mark.slow
def test_who_is_still_to_be_woken_is_not_taken_for_stuck(rank: RankContext) -> None:
    """It sleeps in gloo with good reason, as long as the first attempt is under way."""
    peers = PeerGroup(rank.store(), "inside", rank.rank, 2, seconds=600)
    if rank.rank == 1:
        rank.wait_mark("woken", 0)
        return

    def interrupt(_: bool) -> None:
        threading.Event().wait(4.0)  # computes nothing, and is in no room that communicates
        peers.abort()

    with asking() as (orders, desk), orders.interruptible(2, interrupt, exits_if_stuck=True):
        desk.give(7, _halt(2))
        with pytest.raises(PeerLostError):
            exchange(peers, torch.ones(1, dtype=torch.int64), [1, 1], 1)
    rank.mark("woken")


@pytest.mark.slow
@ranks(1)
def test_a_log_that_hangs_as_it_is_written_into_holds_nobody(rank: RankContext) -> None:
    """Who has come back gets its orders, and is halted, though its trace is still under way."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write, bytes(1 << 16))
    os.set_blocking(write, True)
    own = os.dup(2)
    os.dup2(write, 2)
    with asking() as (orders, desk):
        with orders.interruptible(2, lambda _: None):
            desk.give(7, _halt(2))
            threading.Event().wait(orders_module._STACK_DUMP_AFTER_S + 1.0)
        desk.give(7, _begin(3))
        assert isinstance(orders.wait_for_command(None), Begin)
        with orders.interruptible(3, lambda _: None):
            desk.give(7, _halt(3))
            wait_until(lambda: orders.is_halted(3), what="the next halt")
        desk.give(7, {"kind": "end"})
        assert orders.wait_for_command(None) == End()
        said = b""
        while b"as above" not in said or b"in test_a_log_that_hangs" not in said:
            said += os.read(read, 1 << 16)
        os.dup2(own, 2)


@ranks(1)
def test_who_does_not_come_back_writes_down_where_it_stands(rank: RankContext) -> None:
    log = rank.folder / "where"
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    with asking() as (orders, desk), orders.interruptible(2, lambda _: None):
        desk.give(7, _halt(2))
        wait_until(lambda: "in wait_until" in log.read_text(), what="a trace")
    assert "in test_who_does_not_come_back" in log.read_text()


def _found_in_a_backward(meanwhile: Callable[[], object] = lambda: None) -> list[bool]:
    """What is found of a thread that is in one place of torch all the while. meanwhile: called when
    it begins."""
    found: list[bool] = []
    weight = torch.rand(1200, 1200, requires_grad=True)
    out = weight
    for _ in range(40):
        out = (out @ weight).tanh()
    _looking(found).start()
    meanwhile()
    out.sum().backward()  # type: ignore[no-untyped-call]
    wait_until(lambda: found, what="a finding")
    return found


def _looking(found: list[bool]) -> threading.Thread:
    """From soon on."""
    own = ThreadId.current()
    return threading.Timer(0.3, lambda: found.append(is_any_stuck([own], 0.5)))


def test_who_waits_elsewhere_is_not_stuck() -> None:
    found: list[bool] = []
    looking = _looking(found)
    looking.start()
    looking.join(DEADLINE_S)
    assert found == [False]


@pytest.mark.slow
def test_who_computes_is_not_stuck() -> None:
    assert _found_in_a_backward() == [False]


@ranks(2)
def test_who_waits_for_a_rank_that_hangs_says_so_and_the_other_does_not(rank: RankContext) -> None:
    rank.init_torch_world()
    sleeper, hung = ThreadWatcher(ThreadId.current()), threading.Event()

    def look() -> None:
        said = [
            sleeper.is_asleep(),
            threading.Event().wait(0.5),
            sleeper.is_asleep(),
            sleeper.is_asleep(),
        ]
        assert said == [False, False, rank.rank == 1, rank.rank == 1]
        rank.barrier("said")
        hung.set()

    looking = threading.Timer(1.0, look)
    looking.start()
    if rank.rank == 0:
        hung.wait(DEADLINE_S)
    dist.all_reduce(torch.ones(1))
    looking.join(DEADLINE_S)
    assert hung.is_set()
    computing = threading.Timer(
        0.3, lambda: said.extend([sleeper.is_asleep(), sleeper.is_asleep()])
    )
    said = list[bool]()
    computing.start()
    while not said or computing.is_alive():
        torch.rand(600, 600).matmul(torch.rand(600, 600))
    assert said == [False, False], "it computes"


@pytest.mark.slow
@ranks(1)
def test_who_was_stopped_for_a_while_is_not_stuck(rank: RankContext) -> None:
    """It has used no processor, and stands where it stood, as whoever waits in vain."""

    def stop() -> None:
        own = os.getpid()
        script = f"sleep 0.32; kill -STOP {own}; sleep 2; kill -CONT {own}"
        subprocess.Popen(["sh", "-c", script])

    assert _found_in_a_backward(stop) == [False]


@pytest.mark.parametrize(
    "error", ['RuntimeError("can\'t start new thread")', in_campaign("MemoryError()")]
)
def test_a_worker_that_cannot_start_a_thread_while_it_halts_ends_itself(error: str) -> None:
    code = (
        "from holdfast.elastic.worker.commands import _exit_if_unable_to_halt\n"
        f"with _exit_if_unable_to_halt():\n    raise {error}\n"
        "print('it goes on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (exit_codes.CRASHED, b"")
