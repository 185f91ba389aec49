"""The queue of completions: leases, lost roles, rollbacks, another queue."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from holdfast.rollout.roles.messages import (
    LEASE_S,
    Made,
    Part,
    PolicyPart,
    RoleLost,
    RoleOrders,
    RoleReport,
    Scored,
    TrainerAsk,
    TrainerReply,
    Wanted,
)
from holdfast.rollout.roles.queue import RolloutQueue

PART = PolicyPart(0, "tag", 0, 1, "here:1")
FIRST, SECOND = (Wanted(1, "tag", 0, 0, 3, sample) for sample in (0, 1))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """A queue and its clients."""

    def __init__(self) -> None:
        self.clock, self.said, self.lost = Clock(), list[str](), list[RoleLost]()
        self.queue = RolloutQueue(self.said.append, self.clock, self.lost.append)

    async def ask(self, *wanted: Wanted, step: int = 1, parts: Any = (PART,)) -> TrainerReply:
        return await self.queue.ask(0, TrainerAsk(0, step, wanted, parts, 0.0))

    async def work(
        self, name: str, free: int = 1, *, role: str = "actor", wait: float = 0.0, **rest: Any
    ) -> RoleOrders:
        report = RoleReport(role, name, self.queue.name, "node", free, rest.pop("busy", ()))
        report = RoleReport(**{**vars(report), "wait": wait, **rest})
        return await self.queue.work(0, report)


def made(wanted: Wanted) -> Made:
    return Made(wanted, (5, wanted.sample), (-0.5, -0.25), "stop")


def scored(wanted: Wanted) -> Scored:
    return Scored(made(wanted), "five", (1.0,))


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_what_a_lost_actor_had_goes_to_the_next_one() -> None:
    async def test() -> None:
        desk = Desk()
        await desk.ask(FIRST, SECOND)
        await desk.work("a", 2)
        short, long = (Part(FIRST, (1,) * n, (-1.0,) * n) for n in (1, 3))
        await desk.work("a", 0, busy=(FIRST, SECOND), begun=(long,))
        await desk.work("a", 0, busy=(FIRST, SECOND), begun=(short,))
        await desk.queue.lose(0, RoleLost("a", "node", -9, 5))
        orders = await desk.work("b", 2)
        assert (orders.wanted, orders.begun) == ((FIRST, SECOND), (long,))
        await desk.work("b", 0, busy=(SECOND,), made=(made(FIRST),))
        await desk.work("c", 0, begun=(long,))  # too late
        await desk.queue.lose(0, RoleLost("b", "node", -9))
        assert (await desk.work("d", 2)).begun == ()
        assert [lost.tokens for lost in desk.lost] == [5, None]

    run(test())


def test_a_completion_goes_from_actor_to_scorer_to_trainer() -> None:
    async def test() -> None:
        desk = Desk()
        await desk.ask(FIRST, SECOND, parts=())
        assert (await desk.work("a")).wanted == ()  # no trainer has published the policy
        await desk.ask(FIRST, SECOND)
        orders = await desk.work("a", 5)
        assert (orders.wanted, orders.policies) == ((FIRST, SECOND), (PART,))
        assert (await desk.work("b", 5)).wanted == ()  # all is leased
        await desk.work("a", 0, busy=(SECOND,), made=(made(FIRST),))
        assert (await desk.work("s", role="scorer")).made == (made(FIRST),)
        assert (await desk.ask(FIRST, SECOND)).scored == ()
        await desk.work("s", 0, role="scorer", scored=(scored(FIRST),))
        reply = await desk.ask(FIRST, SECOND)
        assert (reply.scored, reply.actors, reply.scorers) == ((scored(FIRST),), 2, 1)

    run(test())


@pytest.mark.parametrize("how", ["said", "silent", "given back"])
def test_the_lease_of_a_lost_actor_goes_to_another(how: str) -> None:
    async def test() -> None:
        desk = Desk()
        await desk.ask(FIRST)
        assert (await desk.work("a")).wanted == (FIRST,)
        if how == "said":
            lost = RoleLost("a", "node", -9)
            await desk.queue.lose(0, lost)
            assert desk.lost == [lost]
        elif how == "silent":
            desk.clock.now += LEASE_S + 0.1
        else:
            await desk.work("a", 0)
        assert (await desk.work("b")).wanted == (FIRST,)
        # The first one was only slow. Its result counts once, and the other is the same.
        await desk.work("a", 0, made=(made(FIRST),))
        await desk.work("b", 0, made=(made(FIRST),))
        assert not desk.said

    run(test())


def test_no_lease_goes_to_an_actor_that_exited_while_its_question_was_open() -> None:
    async def test() -> None:
        desk = Desk()
        await desk.ask(parts=(PART,))
        question = asyncio.create_task(desk.work("a", wait=2.0))
        await asyncio.sleep(0)
        await desk.queue.lose(0, RoleLost("a", "node", -9))
        await desk.ask(FIRST)
        assert (await question).wanted == ()
        assert (await desk.work("b")).wanted == (FIRST,)

    run(test())


def test_a_queue_that_was_lost_is_filled_again() -> None:
    async def test() -> None:
        desk = Desk()
        await desk.work("s", 0, role="scorer", scored=(scored(FIRST),))  # it kept that
        assert (await desk.ask(FIRST)).scored == (scored(FIRST),)

    run(test())


def test_old_steps_are_forgotten_and_a_generation_may_begin_from_an_older_state() -> None:
    async def test() -> None:
        desk, late = Desk(), Wanted(9, "late", 8, 0, 1, 0)
        await desk.work("s", 0, role="scorer", scored=(scored(FIRST),))
        assert (await desk.ask(late, step=9)).scored == ()
        assert (await desk.ask(FIRST, step=9)).scored == ()  # it was trained long ago
        await desk.ask(FIRST, step=1)
        assert (await desk.work("a")).wanted == (FIRST,)
        await desk.work("a", 0, made=(made(FIRST),))
        assert (await desk.work("s", role="scorer")).made == (made(FIRST),)

    run(test())


def test_completions_that_differ_are_named_once() -> None:
    async def test() -> None:
        desk = Desk()
        await desk.ask(FIRST)
        for tokens in ((1,), (2,), (3,)):
            other = Made(FIRST, tokens, (-0.5,), "stop")
            await desk.work("a", 0, made=(other,))
        assert desk.queue.differing == 2
        assert len(desk.said) == 1
        assert "prompt 3" in desk.said[0]

    run(test())
