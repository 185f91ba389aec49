"""A `torch.distributed.Store` over the agent's HTTP.

Torch's own TCPStore lives in one of the workers, dies with it, and lets anyone on the network read
and set keys. This one lives in the agent, outlives every worker, and every request is signed.
Gloo asks about twenty times a rank to build a group, so a Python store is no bottleneck.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistStoreError, Store

from holdfast.elastic.protocol.rendezvous_messages import (
    RENDEZVOUS_PATH,
    CheckReply,
    CountReply,
    DeleteReply,
    KeysReply,
    StoreRequest,
    ValueReply,
    WaitReply,
)
from holdfast.elastic.protocol.worker_messages import MAX_POLL_WAIT_S
from holdfast.elastic.worker.commands import GenerationHalts
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.wire.http.client import Client

Reply = TypeVar("Reply")


class HttpStore(Store):
    """The rendezvous of the client's generation. Threads may share it; `clone` returns the store
    itself.

    Keep a reference for as long as torch uses it. Torch (through a PrefixStore, too) holds only the
    C++ half. Without this object its calls end in "Not implemented".

    Raises `torch.distributed.DistStoreError` when keys do not appear in time, and FencedError when
    a newer generation has been opened.
    """

    def __init__(self, client: Client, timeout: timedelta = timedelta(seconds=300)) -> None:
        super().__init__()
        self._client = client
        self._timeout = timeout
        self.is_aborted = False
        self._prefix = f"{os.getpid()}.{os.urandom(4).hex()}"
        self._request_numbers = itertools.count()

    # --- what torch calls -----------------------------------------------------------------
    def set(self, key: str, value: bytes | str) -> None:
        self._change_once(StoreRequest("set", key, _to_bytes(value)))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        value = self._poll([key], self._timeout)
        return b"" if value is None else value

    def add(self, key: str, amount: int) -> int:
        return int(self._change_once(StoreRequest("add", key, amount=int(amount))))

    def append(self, key: str, value: bytes | str) -> None:
        self._change_once(StoreRequest("append", key, _to_bytes(value)))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        was, wanted = _to_bytes(expected), _to_bytes(desired)
        return self._change_once(StoreRequest("compare_set", key, expected=was, desired=wanted))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._poll(list(keys), self._timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(StoreRequest("check", keys=tuple(keys)), CheckReply.from_json).has_all

    def delete_key(self, key: str) -> bool:
        return self._ask_once(StoreRequest("delete", key), DeleteReply.from_json).was_there

    def num_keys(self) -> int:
        return self._ask(StoreRequest("num_keys"), CountReply.from_json).key_count

    def list_keys(self) -> list[str]:
        return list(self._ask(StoreRequest("list"), KeysReply.from_json).keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def gather(
        self, key: str, value: bytes, keys: Sequence[str], timeout: timedelta | None = None
    ) -> list[bytes]:
        """Set a key and wait for all of `keys`, in one request: their values."""
        asked = StoreRequest("gather", key, value, keys=tuple(keys))
        values = self._until_ready(asked, timeout or self._timeout).values
        assert values is not None, "what gathers is answered with all values"
        return list(values)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def clone(self) -> HttpStore:
        return self

    def abort(self) -> None:
        """End every wait, in any thread: it raises UnreachableError, as does every later call."""
        self.is_aborted = True
        self._client.abort()

    # --- requests -------------------------------------------------------------------------
    def _poll(self, keys: list[str], timeout: timedelta) -> bytes | None:
        """Wait for all keys; return the first one's value."""
        return self._until_ready(StoreRequest("wait", keys=tuple(keys)), timeout).value

    def _until_ready(self, asked: StoreRequest, timeout: timedelta) -> WaitReply:
        """Wait for all keys and return the answer. Each request waits at most MAX_POLL_WAIT_S."""
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            left = max(0.0, deadline - time.monotonic())
            poll = min(left, MAX_POLL_WAIT_S)
            answer = self._ask(replace(asked, timeout_s=poll), WaitReply.from_json, poll + 10.0)
            if answer.is_ready:
                return answer
            if left <= MAX_POLL_WAIT_S and time.monotonic() >= deadline:
                keys = ", ".join(asked.keys)
                raise DistStoreError(
                    f"wait timeout after {timeout.total_seconds():g} s, keys: {keys}"
                )

    def _change_once(self, asked: StoreRequest) -> bytes:
        """Change a key's value; return the value afterwards."""
        return self._ask_once(asked, ValueReply.from_json).value

    def _ask_once(self, asked: StoreRequest, parse: Callable[[Mapping[str, Any]], Reply]) -> Reply:
        """Send an operation that must not happen twice: it carries a number of its own."""
        number = f"{self._prefix}.{next(self._request_numbers)}"
        return self._ask(replace(asked, request_id=number), parse)

    def _ask(
        self,
        asked: StoreRequest,
        parse: Callable[[Mapping[str, Any]], Reply],
        timeout_s: float = 30.0,
    ) -> Reply:
        """Send an operation; return its answer. parse: makes the answer of its JSON."""
        return parse(self._client.post(RENDEZVOUS_PATH, asked.to_json(), timeout_s))


def _to_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class Rendezvous:
    """The meeting of one generation's groups: their store, and the peers of a live recovery."""

    def __init__(self, client: Client, halts: GenerationHalts) -> None:
        self._client, self._halts = client, halts
        self.store = HttpStore(client)
        self._joining_peers: PeerGroup | None = None  # of a generation into which state is moved

    def on_peers_met(self, control: PeerGroup) -> None:
        """Note that the peers have met, so that `abort` ends waits for them, too."""
        self._joining_peers = control
        if self._halts.is_halted:
            control.abort()  # it did not exist yet when the other peers were woken

    def abort(self) -> bool:
        """End waits for peers, and for ranks to come; return False if they were ended before."""
        if self._joining_peers is not None:
            self._joining_peers.abort()
        if self.store.is_aborted:
            return False
        self.store.abort()
        return True

    def close(self) -> None:
        self._client.close()
