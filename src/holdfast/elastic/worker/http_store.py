"""A `torch.distributed.Store` over the agent's HTTP.

Torch's own TCPStore lives in one of the workers, dies with it, and lets anyone on the network read
and set keys. This one lives in the agent, outlives every worker, and every request is signed.
Gloo asks about twenty times a rank to build a group, so a Python store is no bottleneck.
"""

from __future__ import annotations

import base64
import itertools
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from holdfast.elastic.protocol.worker_messages import MAX_POLL_WAIT_S
from holdfast.elastic.worker.commands import GenerationHalts
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.wire.http.client import Client


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
        self._ask_once("set", key=key, value=_encode(value))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        value = self._poll([key], self._timeout)
        return b"" if value is None else value

    def add(self, key: str, amount: int) -> int:
        return int(_decode(self._ask_once("add", key=key, amount=int(amount))["value"]))

    def append(self, key: str, value: bytes | str) -> None:
        self._ask_once("append", key=key, value=_encode(value))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        answer = self._ask_once(
            "compare_set", key=key, expected=_encode(expected), desired=_encode(desired)
        )
        return _decode(answer["value"])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._poll(list(keys), self._timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys=list(keys))["all"])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask_once("delete", key=key)["deleted"])

    def num_keys(self) -> int:
        return int(self._ask("num_keys")["number"])

    def list_keys(self) -> list[str]:
        return [str(key) for key in self._ask("list")["keys"]]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def gather(
        self, key: str, value: bytes, keys: Sequence[str], timeout: timedelta | None = None
    ) -> list[bytes]:
        """Set a key and wait for all of `keys`, in one request: their values."""
        arguments = {"key": key, "value": _encode(value)}
        answer = self._until_ready("gather", list(keys), timeout or self._timeout, arguments)
        return [_decode(found) for found in answer["values"]]

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
        value = self._until_ready("wait", keys, timeout, {})["value"]
        return None if value is None else _decode(value)

    def _until_ready(
        self, op: str, keys: list[str], timeout: timedelta, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Wait for all keys and return the answer. Each request waits at most MAX_POLL_WAIT_S."""
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            left = max(0.0, deadline - time.monotonic())
            poll = min(left, MAX_POLL_WAIT_S)
            answer = self._ask(op, poll + 10.0, keys=keys, timeout=poll, **arguments)
            if answer["ready"]:
                return answer
            if left <= MAX_POLL_WAIT_S and time.monotonic() >= deadline:
                raise DistStoreError(
                    f"wait timeout after {timeout.total_seconds():g} s, keys: {', '.join(keys)}"
                )

    def _ask_once(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send an operation that must not happen twice: it carries a number of its own."""
        return self._ask(op, id=f"{self._prefix}.{next(self._request_numbers)}", **arguments)

    def _ask(self, op: str, seconds: float = 30.0, /, **arguments: Any) -> dict[str, Any]:
        return self._client.post("/store", {"op": op, **arguments}, seconds)


def _encode(value: bytes | str) -> str:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return base64.b64encode(data).decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


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
