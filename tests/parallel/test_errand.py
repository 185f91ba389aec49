"""A message that never comes whole: who waits for it is left where he is, and the rest goes on.

gloo wakes nobody then, neither when the sender is gone nor when the connections are closed.
"""

from __future__ import annotations

import threading

import pytest
import torch

from holdfast.errors import PeerLostError
from holdfast.parallel.buckets import FlatLayout
from holdfast.parallel.errand import CUT_SHORT, Errand
from holdfast.parallel.reducer import Reducer, Team
from holdfast.parallel.torch_compat import Work, is_peer_loss
from holdfast.parallel.transport import Peers
from tests.ranks import RankContext, ranks, wait_until

SIZE = 32 << 20  # elements: 64 MB a message, of which sockets hold a few


@ranks(2, dies={1: "SIGKILL"})
def test_a_sum_is_given_up_in_the_midst_of_a_piece_and_the_next_one_is_right(
    rank: RankContext,
) -> None:
    """Also when gloo gives the old one up at last, while the new one is under way."""
    layout = FlatLayout.build([[(SIZE,)]])
    peers = Peers(rank.store(), "g1/reduce", rank.rank, 2, seconds=2)  # after which gloo fails
    reducer = Reducer(layout, peers, dtype=torch.float32, device=torch.device("cpu"))
    reducer.begin(2, ((0,), (1,)))
    reducer.start_leaf(rank.rank)
    reducer.slot((0, 0)).fill_(1.0)
    if rank.rank == 0:
        arrivals = reducer.arrivals(1, layout.size // 2)
        rank.mark("listening")
        reducer.done(0)
        wait_until(lambda: bool(arrivals[0, 0] != 0), 60, "the first bytes")
        rank.kill(1)
        assert arrivals[0, -1] == 0, "it came whole: no test"
        ending = threading.Thread(target=reducer.fail, args=(PeerLostError("the end"),))
        ending.start()
        with pytest.raises(PeerLostError):
            reducer.finish()
        ending.join()
        (left,) = (thread for thread in threading.enumerate() if thread.name == "reducer")
        alone = Team.of(Peers(rank.store(), "g2/reduce", 0, 1))
        reducer.regroup(alone, fast=False)
        reducer.begin(1, ((0,),))
        reducer.start_leaf(0)
        reducer.slot((0, 0)).fill_(3.0)
        reducer.done(0)
        wait_until(lambda: not left.is_alive(), 60, "gloo's own time to be over")
        reducer.finish()
        assert torch.equal(reducer.gradient, torch.full((SIZE,), 3.0))
        return
    rank.wait_mark("listening", 0)
    reducer.done(0)
    reducer.finish()
    rank.wait_mark("never", 0)


class Message(Work):
    """One that is read, or broken off, when somebody says so; or never."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.waited, self.ended = broken, threading.Event(), threading.Event()

    def wait(self, timeout: object = None) -> object:
        self.waited.set()
        assert self.ended.wait(60)
        if self.broken:
            raise RuntimeError("Connection reset by peer")
        return True


@pytest.mark.parametrize("broken", [False, True])  # as when gloo's own time is over
def test_an_errand_that_is_left_does_nothing_more(broken: bool) -> None:
    message, did = Message(broken), list[str]()

    def job(errand: Errand) -> None:
        try:
            errand.wait(message)
            did.append("read")
        except RuntimeError:
            did.append("failed")

    errand = Errand(job, "job")
    errand.start()
    assert message.waited.wait(60)
    errand.give_up()
    with pytest.raises(RuntimeError, match=CUT_SHORT) as error:
        errand.join()
    assert is_peer_loss(error.value)
    message.ended.set()
    errand._thread.join(60)
    assert not did


def test_an_errand_that_computes_is_waited_for_and_waits_for_nothing_more() -> None:
    computes, goes_on, after = threading.Event(), threading.Event(), Message()
    did = list[str]()

    def job(errand: Errand) -> None:
        computes.set()
        assert goes_on.wait(60)
        did.append("computed")
        errand.wait(after)
        did.append("read")

    errand = Errand(job, "job")
    errand.start()
    assert computes.wait(60)
    errand.give_up()
    late = threading.Timer(0.5, goes_on.set)
    late.start()
    with pytest.raises(RuntimeError, match=CUT_SHORT):
        errand.join()
    assert did == ["computed"]
    assert not after.waited.is_set()


def test_what_gloo_says_of_a_broken_connection_is_passed_on() -> None:
    message = Message(broken=True)
    errand = Errand(lambda errand: errand.wait(message), "job")
    errand.start()
    assert message.waited.wait(60)
    message.ended.set()
    with pytest.raises(RuntimeError, match="reset by peer"):
        errand.join()


@ranks(2)
def test_a_group_that_was_given_up_sends_nobody_out(rank: RankContext) -> None:
    peers, message = Peers(rank.store(), "g", rank.rank, 2), Message()
    errand = Errand(lambda errand: errand.wait(message), "job")
    peers.abort()
    peers.send_out(errand)
    with pytest.raises(RuntimeError, match=CUT_SHORT):
        peers.fetch(errand)
    assert not message.waited.is_set()
