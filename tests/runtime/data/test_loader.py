"""Reading ahead: order, hashes of what is handed over, errors, an end that waits for nobody."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from holdfast.config.sections.data import DataConfig
from holdfast.data.stream.batch import Batches, Microbatch
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.loader import Loader
from holdfast.data.stream.prefetch import Prefetch
from holdfast.data.stream.shards import ShardFile
from holdfast.errors import StoreError
from tests.support.corpus import batches
from tests.support.ranks import wait_until


@pytest.fixture(name="source")
def _source(small: Dataset, small_config: DataConfig) -> Batches:
    return batches(small, small_config)


def test_steps_come_in_order_with_the_plan_s_microbatches(source: Batches) -> None:
    def plan(step: int) -> list[int]:
        return [3, 1] if step % 2 else [0]

    with Loader(source, plan, first_step=4, last_step=9, depth=3) as loader:
        seen = list(loader)
    assert [s.step for s in seen] == [4, 5, 6, 7, 8, 9]
    for step in seen:
        assert [e["microbatch"] for e in step.entries] == plan(step.step)
        for index, microbatch in zip(plan(step.step), step.microbatches, strict=True):
            direct = source.microbatch(step.step, index)
            assert torch.equal(microbatch.inputs, torch.from_numpy(direct.inputs))
            assert torch.equal(microbatch.targets, torch.from_numpy(direct.targets))
            assert microbatch.entries == direct.entries
        assert step.tokens == sum(m.tokens for m in step.microbatches)
    assert loader.waited_s >= 0.0


def test_parts_reach_the_source(source: Batches) -> None:
    with Loader(source, lambda _: [1], part=1, parts=2, last_step=1) as loader:
        (step,) = loader
    assert step.entries == source.microbatch(1, 1, 1, 2).entries
    assert step.microbatches[0].inputs.shape[0] == 1


class Changing:
    """A source whose arrays are altered after the ledger entry was made."""

    def __init__(self, source: Batches):
        self.source = source

    def microbatch(self, step: int, index: int, part: int = 0, parts: int = 1) -> Microbatch:
        batch = self.source.microbatch(step, index, part, parts)
        batch.inputs[0, 0] += 1
        return batch


def test_the_hash_is_of_the_tokens_handed_over(source: Batches) -> None:
    with Loader(Changing(source), lambda _: [0], last_step=1) as loader:
        (step,) = loader
    assert step.entries[0]["hash"] != source.microbatch(1, 0).entries[0]["hash"]


class Failing:
    """A source that cannot read step 3."""

    def __init__(self, source: Batches):
        self.source = source

    def microbatch(self, step: int, index: int, part: int = 0, parts: int = 1) -> Microbatch:
        if step == 3:
            raise OSError("the disk is gone")
        return self.source.microbatch(step, index, part, parts)


def test_an_error_is_raised_by_its_own_step(source: Batches) -> None:
    with Loader(Failing(source), lambda _: [0]) as loader:
        assert [next(loader).step, next(loader).step] == [1, 2]
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                next(loader)


def test_no_more_than_depth_steps_are_read_ahead(source: Batches) -> None:
    asked: list[int] = []
    reached = threading.Event()

    def plan(step: int) -> list[int]:
        asked.append(step)
        if step == 4:
            reached.set()
        return [0]

    with Loader(source, plan, depth=2) as loader:
        assert next(loader).step == 1
        next(loader)
        assert reached.wait(120)
    assert max(asked) <= 5


def test_close_ends_the_thread_and_the_iteration(source: Batches) -> None:
    loader = Loader(source, lambda _: [0])
    next(loader)
    loader.close()
    loader.close()
    assert not [t for t in threading.enumerate() if t is loader._thread]
    assert list(loader) == []


def test_close_wakes_a_reader_that_waits(source: Batches) -> None:
    """A loop that waits for data must not keep a worker from leaving."""
    waiting, release = threading.Event(), threading.Event()

    class Stuck:
        def microbatch(self, step: int, index: int, part: int = 0, parts: int = 1) -> Microbatch:
            waiting.set()
            assert release.wait(120)
            return source.microbatch(step, index, part, parts)

    loader = Loader(Stuck(), lambda _: [0])
    got: list[object] = []
    reader = threading.Thread(target=lambda: got.extend(loader))
    reader.start()
    assert waiting.wait(120)
    closer = threading.Thread(target=loader.close)
    closer.start()
    reader.join(120)
    assert not reader.is_alive()
    release.set()
    closer.join(120)
    assert not closer.is_alive()
    assert got == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_tensors_arrive_whole(source: Batches) -> None:
    with Loader(source, lambda s: range(source.microbatches(s)), last_step=20, device="cuda") as a:
        for step in a:
            for index, microbatch in enumerate(step.microbatches):
                assert microbatch.inputs.is_cuda
                expected = source.microbatch(step.step, index)
                assert np.array_equal(microbatch.inputs.cpu().numpy(), expected.inputs)
                assert np.array_equal(microbatch.targets.cpu().numpy(), expected.targets)


# --- which shards are fetched ahead ---------------------------------------------------------------
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
