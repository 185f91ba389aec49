"""wait_event: bounded, and a cancellation comes through whenever it comes."""

import asyncio

import pytest

from holdfast.wire.waiting import wait_event


@pytest.mark.parametrize("turns", range(4))
def test_a_cancellation_beside_the_event_is_not_taken_for_it(turns: int) -> None:
    async def scene() -> None:
        event = asyncio.Event()

        async def forever() -> None:
            while True:
                await wait_event(event, 60.0)
                event.clear()

        task = asyncio.create_task(forever())
        await asyncio.sleep(0.01)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=30.0)
        assert done, "it was cancelled and waits on"
        assert task.cancelled()

    asyncio.run(scene())


def test_says_whether_the_event_came() -> None:
    async def scene() -> None:
        event = asyncio.Event()
        assert not await wait_event(event, 0.01)
        assert not await wait_event(event, -1.0)
        event.set()
        assert await wait_event(event, 0.0)
        assert await wait_event(event, None)

    asyncio.run(scene())
