"""A copy in pieces: no piece depends on one thread, and listeners are called before fences
return."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator

import pytest

from holdfast.checkpoint.capture.chunked_copy import (
    MAX_SPANS_PER_PIECE,
    PIECE_BYTES,
    ChunkedCopy,
    CopySpan,
    CopyTiming,
    copy_spans,
    cut_into_pieces,
)
from tests.support.ranks import DEADLINE_S


class Memory:
    """Bytes at a fixed address."""

    def __init__(self, content: bytes) -> None:
        self.buffer = ctypes.create_string_buffer(content, len(content))

    def data_ptr(self) -> int:
        return ctypes.addressof(self.buffer)


def clock(*readings: float) -> Iterator[float]:
    yield from readings


def test_pieces_are_the_spans_cut_in_order() -> None:
    chooser = random.Random(5)
    lengths = [1, PIECE_BYTES, 3 * PIECE_BYTES + 1, *(chooser.randrange(9000) for _ in range(600))]
    source, spans, at = Memory(b""), list[CopySpan](), 0
    for length in lengths:
        spans.append(CopySpan(source, 0, at, length))
        at += length
    pieces = list(cut_into_pieces(spans))
    assert all(0 < sum(s.length for s in piece) <= PIECE_BYTES for piece in pieces)
    assert all(len(piece) <= MAX_SPANS_PER_PIECE for piece in pieces)
    flat = [span for piece in pieces for span in piece]
    assert [s.target_offset for s in flat] == [
        sum(s.length for s in flat[:i]) for i in range(len(flat))
    ]
    assert sum(s.length for s in flat) == at
    assert list(cut_into_pieces([])) == []


def test_bytes_arrive_where_they_belong() -> None:
    content = random.Random(1).randbytes(10_000)
    one, other = Memory(content[:7001]), Memory(content[7001:])
    target = Memory(bytes(10_100))
    for piece in cut_into_pieces([CopySpan(one, 0, 100, 7001), CopySpan(other, 0, 7101, 2999)]):
        copy_spans(target.data_ptr(), piece)
    assert target.buffer.raw == bytes(100) + content


def test_a_source_whose_memory_was_given_back_is_an_error_not_a_crash() -> None:
    class Gone:
        def data_ptr(self) -> int:
            return 0

    with pytest.raises(RuntimeError, match="no memory"):
        copy_spans(Memory(b"12").data_ptr(), [CopySpan(Gone(), 0, 0, 1)])


def test_a_copy_that_got_no_thread_is_made_by_the_fence() -> None:
    done: list[int] = []
    copy = ChunkedCopy(
        [lambda n=n: done.append(n) for n in range(5)],
        lambda: done.append(99),
        clock(0.0, 3.0, 3.5, 3.5).__next__,
    )
    copy.blocked_s = 0.25
    costs: list[CopyTiming] = []
    copy.call_when_done(costs.append)
    assert not copy.is_done
    assert copy.fence() == 0.5
    assert done == [0, 1, 2, 3, 4, 99]
    assert costs == [CopyTiming(blocked_s=0.75, copy_s=3.5, fence_s=0.5)]
    assert copy.fence() == 0.0
    copy.copy_pieces()  # the thread comes at last
    assert len(done) == 6
    copy.call_when_done(costs.append)  # of a copy that has ended: told at once
    assert costs[0] is costs[1]


def test_a_fence_waits_for_the_piece_that_another_has_begun() -> None:
    begun, go, fenced = threading.Event(), threading.Event(), threading.Event()
    told: list[str] = []

    def slow() -> None:
        begun.set()
        assert go.wait(DEADLINE_S)

    copy = ChunkedCopy([slow, fenced.set], lambda: told.append("sealed"))
    copy.call_when_done(lambda cost: told.append(f"fence {cost.fence_s > 0}"))
    thread = threading.Thread(target=copy.copy_pieces)
    thread.start()
    assert begun.wait(DEADLINE_S)
    waiter = threading.Thread(target=lambda: told.append(f"waited {copy.fence() > 0}"))
    waiter.start()
    assert fenced.wait(DEADLINE_S)  # it took the other piece, and waits now
    assert told == []
    go.set()
    waiter.join(DEADLINE_S)
    thread.join(DEADLINE_S)
    assert told == ["sealed", "fence True", "waited True"]


def test_a_copy_that_ends_in_time_costs_no_fence() -> None:
    costs: list[CopyTiming] = []
    copy = ChunkedCopy([lambda: None], lambda: None, clock(1.0, 4.0).__next__)
    copy.call_when_done(costs.append)
    copy.copy_pieces()
    assert copy.fence() == 0.0
    assert costs == [CopyTiming(blocked_s=0.0, copy_s=3.0, fence_s=0.0)]


def test_a_piece_that_fails_seals_nothing_and_hangs_nobody() -> None:
    def fail() -> None:
        raise RuntimeError("the toy broke")

    costs: list[CopyTiming] = []
    copy = ChunkedCopy([fail, lambda: None], pytest.fail)
    copy.call_when_done(costs.append)
    copy.fence()
    assert [str(cost.error) for cost in costs] == ["the toy broke"]


def test_nothing_to_copy_is_whole_at_once() -> None:
    sealed: list[bool] = []
    copy = ChunkedCopy([], lambda: sealed.append(True))
    assert copy.is_done
    assert sealed == [True]


def test_every_piece_is_copied_once_whoever_takes_it() -> None:
    for _ in range(50):
        counts = [0] * 64

        def take(n: int, counts: list[int] = counts) -> None:
            counts[n] += 1

        ends: list[int] = []
        copy = ChunkedCopy(
            [lambda n=n: take(n) for n in range(64)], lambda ends=ends: ends.append(1)
        )
        threads = [threading.Thread(target=copy.copy_pieces) for _ in range(3)]
        for thread in threads:
            thread.start()
        copy.fence()
        assert counts == [1] * 64
        assert ends == [1]
        for thread in threads:
            thread.join(DEADLINE_S)
