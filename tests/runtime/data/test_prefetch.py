"""Which shards are fetched ahead: in the order of need, up to the limit, as the steps go by."""

from __future__ import annotations

import threading

from holdfast.data.stream.prefetch import Prefetch
from holdfast.data.stream.shards import ShardFile
from holdfast.errors import StoreError
from tests.support.ranks import wait_until

FILES = [ShardFile(f"shards/{number}.bin", 10, "") for number in range(12)]


class FakeCache:
    """A cache that notes what is fetched. away: the address does not answer."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.fetched: list[str] = []
        self.away = False
        self.asked = threading.Event()
        self._lock = threading.Lock()

    def has(self, file: ShardFile) -> bool:
        return file.path in self.fetched

    def touch(self, file: ShardFile) -> None:
        """Nothing is removed here."""

    def fetch(self, file: ShardFile, *, wait: bool = True) -> bool:
        self.asked.set()
        if self.away:
            raise StoreError("away")
        with self._lock:
            self.fetched.append(file.path)
        return True


def _paths(files: list[ShardFile]) -> set[str]:
    return {file.path for file in files}


def _prefetch(cache: FakeCache, always: list[ShardFile], steps: int = 12) -> Prefetch:
    """Step n needs the files n - 1 and n."""
    return Prefetch(
        cache,  # type: ignore[arg-type]
        lambda step: FILES[step - 1 : step + 1],
        steps,
        always,
        len(FILES),
    )


def test_all_files_come_if_the_cache_has_room() -> None:
    cache = FakeCache(limit=1000)
    _prefetch(cache, FILES[-1:]).reach(1)
    wait_until(lambda: set(cache.fetched) == _paths(FILES))
    assert len(cache.fetched) == len(FILES)


def test_a_small_cache_is_filled_in_the_order_of_need_and_moves_on() -> None:
    cache = FakeCache(limit=60)
    ahead = _prefetch(cache, FILES[-1:])  # one of the six is always needed
    ahead.reach(1)
    wait_until(lambda: set(cache.fetched) == _paths([*FILES[:5], FILES[-1]]))
    ahead.reach(3)  # files 0 and 1 are needed no more
    wait_until(lambda: set(cache.fetched) == _paths([*FILES[:7], FILES[-1]]))
    assert len(cache.fetched) == 8


def test_files_that_the_run_does_not_need_are_not_fetched() -> None:
    cache, before = FakeCache(limit=1000), set(threading.enumerate())
    _prefetch(cache, [], steps=3).reach(1)
    wait_until(lambda: set(threading.enumerate()) <= before)
    assert set(cache.fetched) == _paths(FILES[:4])
    assert len(cache.fetched) == 4


def test_an_address_that_is_away_is_asked_again() -> None:
    cache = FakeCache(limit=1000)
    cache.away = True
    _prefetch(cache, []).reach(1)
    assert cache.asked.wait(120)
    cache.away = False
    wait_until(lambda: set(cache.fetched) == _paths(FILES))
