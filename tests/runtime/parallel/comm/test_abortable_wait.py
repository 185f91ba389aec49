"""A message that never comes whole: who waits for it is left where he is, and the rest goes on.

gloo wakes nobody then, neither when the sender is gone nor when the connections are closed.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from holdfast.core.sharding.reduction_tree import Shares
from holdfast.errors import PeerLostError
from holdfast.parallel.comm.abortable_wait import CONNECTION_CLOSED, AbortableWait
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.gradients.buckets import FlatLayout
from holdfast.parallel.gradients.cell_team import CellTeam, ExchangeKind
from holdfast.parallel.gradients.reducer import Reducer
from holdfast.parallel.torch_compat import Work, is_peer_loss
from tests.support.dying_rank import SENDING, dies_sending
from tests.support.processes import runs
from tests.support.ranks import RankContext, ranks, wait_until

SIZE = 16 << 20  # elements: 32 MB a message, of which sockets hold a few
BY_THE_OTHER: Shares = ((), (0,))
"""Rank 0 computes nothing, and is sent all of it."""
VICTIMS = 3  # one of them is in the midst of it when it ends
GIVEN_UP = 6.0  # seconds after which gloo ends a wait itself


def _begun(
    rank: RankContext,
    group: str,
    me: int,
    shares: Shares,
    *,
    fast: bool = False,
    exchange: ExchangeKind = "direct",
    seconds: float = GIVEN_UP,
) -> Reducer:
    """A sum over two, of which the own piece is still to come, where there is one."""
    layout = FlatLayout.build([[(SIZE,)]])
    team = CellTeam.of_replicas(PeerGroup(rank.store(), group, me, 2, seconds=seconds), exchange)
    reducer = Reducer(layout, team, dtype=torch.float32, device=torch.device("cpu"), fast=fast)
    reducer.begin(sum(map(len, shares)), shares)
    for leaf in shares[me]:
        reducer.start_leaf(leaf)
        reducer.slot((0, 0)).fill_(1.0)
    return reducer


def _goes_on_alone(reducer: Reducer, rank: RankContext) -> None:
    old = reducer.peers
    reducer.regroup(CellTeam.of_replicas(PeerGroup(rank.store(), "alone", 0, 1)), fast=reducer.fast)
    old.close()
    reducer.begin(1, ((0,),))
    reducer.start_leaf(0)
    reducer.slot((0, 0)).fill_(3.0)
    reducer.bucket_done(0)


@ranks(1 + VICTIMS, dies=dict.fromkeys(range(1, 1 + VICTIMS), "SIGALRM"))
@pytest.mark.slow
def test_a_sum_is_given_up_in_the_midst_of_a_piece_and_the_next_one_is_right(
    rank: RankContext,
) -> None:
    """Also when gloo gives the old one up at last, while the new one is under way."""
    if rank.rank > 0:
        reducer = _begun(rank, f"g{rank.rank}/reduce", 1, BY_THE_OTHER)
        rank.wait_mark(f"listening{rank.rank}", 0)
        dies_sending(rank, reducer.peers)
        reducer.bucket_done(0)
        reducer.finish()
        rank.wait_mark("never", 0)
    cut = [left for victim in range(1, 1 + VICTIMS) if (left := _given_up(rank, victim))]
    assert cut, "nobody was in the midst of it"
    reducer, thread = cut[-1]
    _goes_on_alone(reducer, rank)
    wait_until(lambda: not thread.is_alive(), what="gloo's own time to be over")
    reducer.finish()
    assert torch.equal(reducer.gradient, torch.full((SIZE,), 3.0))


def _given_up(rank: RankContext, victim: int) -> tuple[Reducer, threading.Thread] | None:
    """The sum with one that ends on the way, and the thread that was left; None where its piece
    did not begin to come, or came whole."""
    before = set(threading.enumerate())
    reducer = _begun(rank, f"g{victim}/reduce", 0, BY_THE_OTHER)
    (thread,) = (t for t in threading.enumerate() if t.name == "reducer" and t not in before)
    arrivals = reducer.scratch("arrivals", reducer.layout.size // 2)
    rank.mark(f"listening{victim}")
    wait_until(lambda: not runs(rank.pid(victim)), what="its end")
    ending = threading.Thread(target=reducer.fail, args=(PeerLostError("the end"),))
    ending.start()
    with pytest.raises(PeerLostError):
        reducer.finish()
    ending.join()
    cut = bool(arrivals[0] != 0) and bool(arrivals[-1] == 0)
    assert not cut or thread.is_alive(), "nobody had to be left"
    return (reducer, thread) if cut else None


class Collective:
    """A group of gloo, of which a collective is not over. ended: it is."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def recv(self, *_: object) -> Work:
        raise RuntimeError("Connection closed by peer")

    def __del__(self) -> None:
        self._ended.wait(120)


@ranks(1)
def test_a_group_is_left_whose_collective_does_not_end(rank: RankContext) -> None:
    peers, ended = PeerGroup(rank.store(), "g", 0, 1), threading.Event()
    group: Any = Collective(ended)
    peers._group = group
    del group
    peers.abort()
    begun = time.monotonic()
    peers.close()
    assert time.monotonic() - begun < 60
    ended.set()


@ranks(1 + VICTIMS, dies=dict.fromkeys(range(1, 1 + VICTIMS), "SIGALRM"))
@pytest.mark.slow
def test_a_collective_is_given_up_in_the_midst_of_a_piece(rank: RankContext) -> None:
    """gloo's own time is ten minutes here: the next sum does not wait for it."""
    for victim in range(1, 1 + VICTIMS):
        if rank.rank not in (0, victim):
            continue
        reducer = _begun(
            rank,
            f"g{victim}/reduce",
            int(rank.rank > 0),
            BY_THE_OTHER,
            exchange="gathered",
            seconds=600,
        )
        if rank.rank > 0:
            rank.wait_mark(f"listening{victim}", 0)
            rank.die_within(SENDING)
            reducer.bucket_done(0)
            rank.wait_mark("never", 0)
        rank.mark(f"listening{victim}")
        pid = rank.pid(victim)
        wait_until(partial(lambda pid: not runs(pid), pid), what="its end")
        reducer.fail(PeerLostError("the end"))
        with pytest.raises(PeerLostError):
            reducer.finish()
        begun = time.monotonic()
        _goes_on_alone(reducer, rank)
        reducer.finish()
        assert time.monotonic() - begun < 60
        assert torch.equal(reducer.gradient, torch.full((SIZE,), 3.0))


@ranks(2, dies={1: "SIGALRM"})
def test_the_backends_own_sum_is_given_up_too(rank: RankContext) -> None:
    """`reduction: fast`: gloo's own threads wait there, and whoever ends its group, for them."""
    reducer = _begun(rank, "g1/reduce", rank.rank, ((0,), (1,)), fast=True)
    if rank.rank > 0:
        rank.wait_mark("listening", 0)
        rank.die_within(SENDING)
        reducer.bucket_done(0)
        reducer.finish()
        rank.wait_mark("never", 0)
    rank.mark("listening")
    reducer.bucket_done(0)
    wait_until(lambda: not runs(rank.pid(1)), what="its end")
    begun = time.monotonic()
    with pytest.raises(PeerLostError):
        reducer.finish()
    _goes_on_alone(reducer, rank)
    reducer.finish()
    assert time.monotonic() - begun < GIVEN_UP
    assert torch.equal(reducer.gradient, torch.full((SIZE,), 3.0))


class Message(Work):
    """One that is read, or broken off, when somebody says so; or never."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.waited, self.ended = broken, threading.Event(), threading.Event()

    def wait(self, timeout: object = None) -> object:
        self.waited.set()
        assert self.ended.wait(120)
        if self.broken:
            raise RuntimeError("Connection reset by peer")
        return True


@pytest.mark.parametrize("broken", [False, True])  # as when gloo's own time is over
def test_an_errand_that_is_left_does_nothing_more(broken: bool) -> None:
    message, did = Message(broken), list[str]()

    def job(errand: AbortableWait) -> None:
        try:
            errand.wait(message)
            did.append("read")
        except RuntimeError:
            did.append("failed")

    errand = AbortableWait(job, "job")
    errand.start()
    assert message.waited.wait(120)
    errand.abort()
    with pytest.raises(RuntimeError, match=CONNECTION_CLOSED) as error:
        errand.join()
    assert is_peer_loss(error.value)
    message.ended.set()
    errand._thread.join(120)
    assert not did


def test_an_errand_that_computes_is_waited_for_and_waits_for_nothing_more() -> None:
    computes, goes_on, after = threading.Event(), threading.Event(), Message()
    did = list[str]()

    def job(errand: AbortableWait) -> None:
        computes.set()
        assert goes_on.wait(120)
        did.append("computed")
        errand.wait(after)
        did.append("read")

    errand = AbortableWait(job, "job")
    errand.start()
    assert computes.wait(120)
    errand.abort()
    late = threading.Timer(0.5, goes_on.set)
    late.start()
    with pytest.raises(RuntimeError, match=CONNECTION_CLOSED):
        errand.join()
    assert did == ["computed"]
    assert not after.waited.is_set()


def test_what_gloo_says_of_a_broken_connection_is_passed_on() -> None:
    message = Message(broken=True)
    errand = AbortableWait(lambda errand: errand.wait(message), "job")
    errand.start()
    assert message.waited.wait(120)
    message.ended.set()
    with pytest.raises(RuntimeError, match="reset by peer"):
        errand.join()


@ranks(2)
def test_a_group_that_was_given_up_sends_nobody_out(rank: RankContext) -> None:
    peers, message = PeerGroup(rank.store(), "g", rank.rank, 2), Message()
    rank.barrier("joined")
    errand = AbortableWait(lambda errand: errand.wait(message), "job")
    peers.abort()
    peers.start_wait(errand)
    with pytest.raises(RuntimeError, match=CONNECTION_CLOSED):
        peers.join_wait(errand)
    assert not message.waited.is_set()
