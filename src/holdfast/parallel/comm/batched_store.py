"""A group's rendezvous in one request a rank.

To connect a group of n, gloo stores one key and then asks for n, twice each: 2n + 1 trips. The
keys are known beforehand, as they end in the rank. So a store that can `gather` (put mine, wait for
all) is asked once, and gloo is answered from what came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store

Gather = Callable[[str, bytes, Sequence[str], timedelta], list[bytes]]
"""(my key, my value, all ranks' keys, how long to wait) -> all ranks' values."""


class BatchedStore(Store):
    """The part of a store that gloo needs while `size` ranks connect one group.

    Keep a reference for as long as torch uses it. Raises what `gather` raises.
    note: a line that the other ranks receive at the same time; `notes` are those of all ranks, by
    rank, once they have met.
    """

    def __init__(
        self, gather: Gather, rank: int, size: int, seconds: float, note: str = ""
    ) -> None:
        super().__init__()
        self.note, self.notes = note, tuple[str, ...]()
        self._gather, self._rank, self._size = gather, rank, size
        self._timeout = timedelta(seconds=seconds)
        self._own_values: dict[str, bytes] = {}
        self._gathered_values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Keep the value here until another rank's value is asked for."""
        self._own_values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        if key not in self._gathered_values:
            # Exchange the values of all ranks for the round of keys that `key` is one of.
            base = key.rpartition("/")[0]
            keys = [f"{base}/{rank}" for rank in range(self._size)]
            mine = keys[self._rank]
            told = self.note.encode() + b"\n" + self._own_values[mine]
            said = [each.partition(b"\n") for each in self._gather(mine, told, keys, self._timeout)]
            self.notes = tuple(note.decode() for note, _, _ in said)
            self._gathered_values.update(zip(keys, (value for _, _, value in said), strict=True))
        return self._gathered_values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._gathered_values for key in keys)

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def clone(self) -> BatchedStore:
        return self


def make_batched_store(store: Store, rank: int, size: int, seconds: float, note: str = "") -> Any:
    """The store to connect a group by: the given one, if it cannot gather."""
    gather: Gather | None = getattr(store, "gather", None)
    return store if gather is None else BatchedStore(gather, rank, size, seconds, note)
