"""The rendezvous of a generation's processes: a key-value store behind the agent's HTTP.

It is the server side of `elastic.worker.http_store.HttpStore`. Values are bytes, sent as base64. A
wait is a long poll: the answer comes when the keys exist or at the deadline, and the client asks
again. A new generation empties the store and ends every wait with FencedError.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace

from holdfast.elastic.protocol.rendezvous_messages import (
    CheckReply,
    CountReply,
    DeleteReply,
    KeysReply,
    StoreReply,
    StoreRequest,
    ValueReply,
    WaitReply,
)
from holdfast.elastic.protocol.worker_messages import MAX_POLL_WAIT_S
from holdfast.errors import FencedError
from holdfast.wire.waiting import wait_event

_MAX_REMEMBERED_REPLIES = 4096  # answers remembered for requests that arrive twice


class RendezvousStore:
    """The store of the newest generation. Lives in one event loop and needs no lock."""

    def __init__(self) -> None:
        self._generation = 0
        self._values: dict[str, bytes] = {}
        self._values_changed = asyncio.Event()
        self._remembered_replies: OrderedDict[str, StoreReply] = OrderedDict()

    def begin_generation(self, generation: int) -> None:
        """Forget older generations, and end their waits."""
        self._generation = generation
        self._values.clear()
        self._remembered_replies.clear()
        self._notify()

    async def handle_operation(self, generation: int, asked: StoreRequest) -> StoreReply:
        """Carry out one operation. Raises ValueError for an operation that is not known."""
        if asked.op == "wait":
            return await self._wait(generation, asked)
        if asked.op == "gather":  # sets the same value when it arrives twice
            self._set(self._key(asked.key), asked.value)
            answer = await self._wait(generation, asked)
            if answer.is_ready:
                found = tuple(self._values[self._key(key)] for key in asked.keys)
                answer = replace(answer, values=found)
            return answer
        request = asked.request_id
        if request and request in self._remembered_replies:  # its first answer was lost on the way
            return self._remembered_replies[request]
        reply = self._apply(asked)
        if request:
            self._remembered_replies[request] = reply
            while len(self._remembered_replies) > _MAX_REMEMBERED_REPLIES:
                self._remembered_replies.popitem(last=False)
        return reply

    async def _wait(self, generation: int, asked: StoreRequest) -> WaitReply:
        """Wait for the keys of a request; the answer has the first key's value."""
        keys = [self._key(key) for key in asked.keys]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(asked.timeout_s, MAX_POLL_WAIT_S)
        while not all(key in self._values for key in keys):
            left = deadline - loop.time()
            if left <= 0:
                return WaitReply(False)
            changed = self._values_changed
            if not await wait_event(changed, left):
                return WaitReply(False)
            if generation != self._generation:
                raise FencedError(f"generation {generation} is over: {self._generation} rules")
        return WaitReply(True, self._values[keys[0]] if keys else None)

    def _apply(self, asked: StoreRequest) -> StoreReply:
        key = self._key(asked.key)
        match asked.op:
            case "num_keys":
                return CountReply(len(self._values))
            case "check":
                return CheckReply(all(self._key(one) in self._values for one in asked.keys))
            case "list":
                prefix = self._key("")
                return KeysReply(tuple(sorted(one.removeprefix(prefix) for one in self._values)))
            case "delete":
                return DeleteReply(self._values.pop(key, None) is not None)
            case "compare_set":
                return ValueReply(self._compare_set(key, asked))
        value = self._compute_value(key, asked)
        self._set(key, value)
        return ValueReply(value)

    def _compare_set(self, key: str, asked: StoreRequest) -> bytes:
        """Return the value afterwards.

        If an expected key is absent, store nothing and return the expected value, as torch's own
        stores do."""
        old = self._values.get(key)
        if (old or b"") != asked.expected:
            return asked.expected if old is None else old
        self._set(key, asked.desired)
        return asked.desired

    def _compute_value(self, key: str, asked: StoreRequest) -> bytes:
        old = self._values.get(key)
        match asked.op:
            case "set":
                return asked.value
            case "append":
                return (old or b"") + asked.value
            case "add":
                # A counter is kept as decimal text: torch reads it back with `get`, too.
                return str(int(old or b"0") + asked.amount).encode()
            case op:
                raise ValueError(f"the rendezvous does not know the operation {op!r}")

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._notify()

    def _key(self, key: str) -> str:
        return f"{self._generation}/{key}"

    def _notify(self) -> None:
        """Wake every wait. Each event is set once and replaced, so none is missed."""
        changed, self._values_changed = self._values_changed, asyncio.Event()
        changed.set()
