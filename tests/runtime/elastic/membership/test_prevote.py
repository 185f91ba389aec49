"""One search for a silent coordinator, round by round, over real sockets."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.elastic.membership.prevote import MAX_OPEN_QUERIES, PreVote
from holdfast.errors import HoldfastError
from holdfast.policy.membership.election import PreVoteReply
from holdfast.wire.http.auth import Verifier
from holdfast.wire.http.server import Handler, HttpListener, SignedApplication
from holdfast.wire.http.sockets import address_of, bind_listener
from holdfast.wire.journal import segment_key
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import TERM_PATH, create_generation

SECRET = Secret(b"s" * 32)
LONG = 600.0  # longer than the test may take


class Other:
    """Another agent, as far as it is asked."""

    def __init__(self, hears: Handler) -> None:
        self._bound = bind_listener("127.0.0.1", 0, "cluster.interface")
        self.address = address_of(self._bound)
        verifier = Verifier(SECRET, time.time)
        guard = SignedApplication(
            {TERM_PATH: hears},
            SECRET,
            verifier,
            lambda: 0,
            generationless_paths=frozenset({TERM_PATH}),
        )
        self._serving = asyncio.create_task(HttpListener(guard, self._bound).serve())

    async def close(self) -> None:
        self._serving.cancel()
        await asyncio.wait({self._serving})


def _says(hears: bool, term: int = 3) -> Handler:
    async def answer(_: int, body: dict[str, Any]) -> dict[str, Any]:
        return {"hears": hears, "term": term}

    return answer


async def _silence(_: int, body: dict[str, Any]) -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


async def _nobody() -> None:
    await asyncio.Event().wait()


def test_who_says_nothing_is_waited_for_in_one_round_of_a_search() -> None:
    async def scene() -> None:
        others = {
            "b": Other(_says(False)),
            "c": Other(_says(True)),
            "d": Other(_says(True, term=2)),
            "mute": Other(_silence),
        }
        ended = bind_listener("127.0.0.1", 0, "cluster.interface")
        there = {name: other.address for name, other in others.items()}
        there["dead"] = address_of(ended)
        ended.close()
        search = PreVote(SECRET)
        said = {
            "b": PreVoteReply.MISSES_LEADER,
            "c": PreVoteReply.HEARS_LEADER,
            "d": PreVoteReply.UNKNOWN,
            "mute": PreVoteReply.UNKNOWN,
            "dead": PreVoteReply.DEAD,
        }
        while await search.ask_round(there, 3, _nobody, lambda: True, 1.0) != said:
            pass  # this machine was slow
        # The coordinator and the mute one are asked still; nobody waits for them.
        assert await search.ask_round(there, 3, _nobody, lambda: True, LONG) == said
        search.close()
        for other in others.values():
            await other.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_coordinator_that_answers_ends_the_round() -> None:
    async def scene() -> None:
        mute = Other(_silence)
        silent = [True]

        async def back() -> None:
            silent.clear()

        search = PreVote(SECRET)
        said = await search.ask_round({"m": mute.address}, 1, back, lambda: bool(silent), LONG)
        assert said == {"m": PreVoteReply.UNKNOWN}
        await search.finish(True)
        await mute.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_what_the_coordinator_orders_is_taken_in_before_the_search_ends() -> None:
    async def scene() -> None:
        told, taken = asyncio.Event(), asyncio.Event()
        silent = [True]

        async def back() -> None:
            silent.clear()
            await told.wait()
            taken.set()

        search = PreVote(SECRET)
        beginning = asyncio.create_task(search.ask_round({}, 1, back, lambda: bool(silent), 0.05))
        await beginning
        ending = asyncio.create_task(search.finish(True))
        await asyncio.sleep(0)
        assert not ending.done()
        told.set()
        await ending
        assert taken.is_set()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_what_it_refuses_is_raised() -> None:
    async def scene() -> None:
        async def back() -> None:
            raise HoldfastError("it is replaced")

        search = PreVote(SECRET)
        with pytest.raises(HoldfastError, match="replaced"):
            await search.ask_round({}, 1, back, lambda: True, LONG)
        search.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_the_growth_of_a_journal_is_that_of_the_node_that_writes_it(tmp_path: Path) -> None:
    """Names may have dots: a.b is not b."""
    store = FolderStore(tmp_path)
    create_generation(store, 1, {})

    def write(writer: str) -> None:
        store.append(segment_key(1, writer), b"{}\n")

    for writer in ("agent.b", "agent.a.b", "rank0"):
        write(writer)
    search = PreVote(SECRET)
    search.observe_journals(store, "c", "b")
    write("agent.a.b")
    before = search.journal_sizes
    search.observe_journals(store, "c", "b")
    assert search.journal_sizes != before
    assert not search.has_leader_progress(LONG)
    write("agent.b")
    search.observe_journals(store, "c", "b")
    assert search.has_leader_progress(LONG)
    search.close()


def test_many_agents_are_asked_with_few_descriptors() -> None:
    async def scenario() -> None:
        asked, most = 0, 0

        async def answer(_: int, body: dict[str, Any]) -> dict[str, Any]:
            nonlocal asked, most
            asked += 1
            most = max(most, asked)
            await asyncio.sleep(0.01)  # so that those asked at a time are here at a time
            asked -= 1
            return {"hears": True, "term": 3}

        async def rejoin() -> None:
            pass

        other = Other(answer)
        search = PreVote(SECRET)
        names = {f"n{i}": other.address for i in range(3 * MAX_OPEN_QUERIES)}
        replies = await search.ask_round(names, 3, rejoin, lambda: True, LONG)
        assert replies == dict.fromkeys(names, PreVoteReply.HEARS_LEADER)
        assert 1 < most <= MAX_OPEN_QUERIES
        search.close()
        await other.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))
