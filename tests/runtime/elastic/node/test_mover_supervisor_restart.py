"""What stands between a mover that ends and the next one that serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.elastic.agent.node_processes import MoverRestarter
from holdfast.errors import FencedError, HoldfastError

PAUSES = (0.001, 0.002)


class Mover:
    """What becomes of each attempt, one after the other: an error, or whether one is alive then."""

    def __init__(self, *fates: Exception | bool) -> None:
        self.fates, self.alive, self.said = list(fates), False, list[str]()
        self.back = 0
        self.reviving = MoverRestarter(
            self.revive, lambda: self.alive, self.said.append, self.is_back, PAUSES
        )

    def is_back(self) -> None:
        self.back += 1

    async def revive(self) -> None:
        await asyncio.sleep(0)
        fate = self.fates.pop(0)
        self.reviving.start()  # the end of an attempt's process is told like any other
        if isinstance(fate, Exception):
            raise fate
        self.alive = fate


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.001)


def played(*fates: Exception | bool) -> Mover:
    async def play() -> Mover:
        mover = Mover(*fates)
        mover.reviving.start()
        await _until(lambda: not mover.fates and mover.alive)
        await asyncio.sleep(0.01)
        await mover.reviving.stop()
        return mover

    return asyncio.run(play())


def test_one_that_ends_as_soon_as_it_was_started_is_started_again() -> None:
    mover = played(False, False, True)
    assert mover.back == 1
    assert sum("a new one is started" in line for line in mover.said) == 1


def test_what_keeps_it_from_starting_is_said_once_and_our_own_bug_too() -> None:
    mover = played(
        HoldfastError("the folder is away"),
        HoldfastError("the folder is away"),
        KeyError("peers"),
        FencedError("2 rules"),
        True,
    )
    assert [line for line in mover.said if "the folder is away" in line] == [
        "there is no new mover yet, and no checkpoint: the folder is away"
    ]
    assert any("KeyError: 'peers'" in line for line in mover.said)
    assert mover.back == 1


def test_none_is_started_once_the_agent_ends() -> None:
    async def play() -> Mover:
        mover = Mover(*[HoldfastError("away")] * 1000)
        mover.reviving.start()
        await _until(lambda: len(mover.fates) < 990)
        await mover.reviving.stop()
        left = len(mover.fates)
        await asyncio.sleep(0.05)
        assert len(mover.fates) == left
        return mover

    assert not asyncio.run(play()).back
