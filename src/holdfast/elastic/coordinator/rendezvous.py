"""The rendezvous of a generation's processes: a key-value store behind the agent's HTTP.

It is the server side of `elastic.worker.http_store.HttpStore`. Values are bytes, sent as base64. A
wait is a long poll: the answer comes when the keys exist or at the deadline, and the client asks
again. A new generation empties the store and ends every wait with FencedError.
"""

from __future__ import annotations

import asyncio
import base64
from collections import OrderedDict
from typing import Any

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
        self._remembered_replies: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def begin_generation(self, generation: int) -> None:
        """Forget older generations, and end their waits."""
        self._generation = generation
        self._values.clear()
        self._remembered_replies.clear()
        self._notify()

    async def handle_operation(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        """Carry out one operation. Raises ValueError or KeyError for a malformed one."""
        op = str(body["op"])
        if op == "wait":
            return await self._wait(generation, body)
        if op == "gather":  # sets the same value when it arrives twice
            self._set(self._key(body["key"]), _decode(body["value"]))
            answer = await self._wait(generation, body)
            if answer["ready"]:
                found = (self._values[self._key(key)] for key in body["keys"])
                answer["values"] = [_encode(value) for value in found]
            return answer
        request = str(body.get("id", ""))
        if request and request in self._remembered_replies:  # its first answer was lost on the way
            return self._remembered_replies[request]
        answer = self._apply(op, body)
        if request:
            self._remembered_replies[request] = answer
            while len(self._remembered_replies) > _MAX_REMEMBERED_REPLIES:
                self._remembered_replies.popitem(last=False)
        return answer

    async def _wait(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        """Return {"ready": bool, "value": ...}; the first key's value saves a round trip."""
        keys = [self._key(key) for key in body["keys"]]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(float(body["timeout"]), MAX_POLL_WAIT_S)
        while not all(key in self._values for key in keys):
            left = deadline - loop.time()
            if left <= 0:
                return {"ready": False}
            changed = self._values_changed
            if not await wait_event(changed, left):
                return {"ready": False}
            if generation != self._generation:
                raise FencedError(f"generation {generation} is over: {self._generation} rules")
        return {"ready": True, "value": _encode(self._values[keys[0]]) if keys else None}

    def _apply(self, op: str, body: dict[str, Any]) -> dict[str, Any]:
        if op == "num_keys":
            return {"number": len(self._values)}
        if op == "check":
            return {"all": all(self._key(key) in self._values for key in body["keys"])}
        if op == "list":
            prefix = self._key("")
            return {"keys": sorted(key.removeprefix(prefix) for key in self._values)}
        key = self._key(body["key"])
        if op == "delete":
            return {"deleted": self._values.pop(key, None) is not None}
        if op == "compare_set":
            return {"value": _encode(self._compare_set(key, body))}
        value = self._compute_value(op, key, body)
        self._set(key, value)
        return {"value": _encode(value)}

    def _compare_set(self, key: str, body: dict[str, Any]) -> bytes:
        """Return the value afterwards.

        If an expected key is absent, store nothing and return the expected value, as torch's own
        stores do."""
        expected, desired = _decode(body["expected"]), _decode(body["desired"])
        old = self._values.get(key)
        if (old or b"") != expected:
            return expected if old is None else old
        self._set(key, desired)
        return desired

    def _compute_value(self, op: str, key: str, body: dict[str, Any]) -> bytes:
        old = self._values.get(key)
        if op == "set":
            return _decode(body["value"])
        if op == "append":
            return (old or b"") + _decode(body["value"])
        if op == "add":
            # A counter is kept as decimal text: torch reads it back with `get`, too.
            return str(int(old or b"0") + int(body["amount"])).encode()
        raise ValueError(f"the rendezvous does not know the operation {op!r}")

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._notify()

    def _key(self, key: Any) -> str:
        return f"{self._generation}/{key}"

    def _notify(self) -> None:
        """Wake every wait. Each event is set once and replaced, so none is missed."""
        changed, self._values_changed = self._values_changed, asyncio.Event()
        changed.set()


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
