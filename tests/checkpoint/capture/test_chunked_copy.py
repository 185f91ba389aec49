"""A copy in pieces: no piece depends on one thread, and listeners are called before fences
return."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator

import pytest

from holdfast.checkpoint.capture.chunked_copy import (
    PIECE_BYTES,
    PIECE_SPANS,
    Copy,
    Cost,
    Span,
    cut,
    move,
)

DEADLINE = 60.0


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
    source, spans, at = Memory(b""), list[Span](), 0
    for length in lengths:
        spans.append(Span(source, 0, at, length))
        at += length
    pieces = list(cut(spans))
    assert all(0 < sum(s.length for s in piece) <= PIECE_BYTES for piece in pieces)
    assert all(len(piece) <= PIECE_SPANS for piece in pieces)
    flat = [span for piece in pieces for span in piece]
    assert [s.target for s in flat] == [sum(s.length for s in flat[:i]) for i in range(len(flat))]
    assert sum(s.length for s in flat) == at
    assert list(cut([])) == []


def test_bytes_arrive_where_they_belong() -> None:
    content = random.Random(1).randbytes(10_000)
    one, other = Memory(content[:7001]), Memory(content[7001:])
    target = Memory(bytes(10_100))
    for piece in cut([Span(one, 0, 100, 7001), Span(other, 0, 7101, 2999)]):
        move(target.data_ptr(), piece)
    assert target.buffer.raw == bytes(100) + content


def test_a_source_whose_memory_was_given_back_is_an_error_not_a_crash() -> None:
    class Gone:
        def data_ptr(self) -> int:
            return 0

    with pytest.raises(RuntimeError, match="no memory"):
        move(Memory(b"12").data_ptr(), [Span(Gone(), 0, 0, 1)])


def test_a_copy_that_got_no_thread_is_made_by_the_fence() -> None:
    done: list[int] = []
    copy = Copy(
        [lambda n=n: done.append(n) for n in range(5)], lambda: done.append(99),
        clock(0.0, 3.0, 3.5, 3.5).__next__,
    )  # fmt: skip
    copy.blocked = 0.25
    costs: list[Cost] = []
    copy.after(costs.append)
    assert not copy.ended
    assert copy.fence() == 0.5
    assert done == [0, 1, 2, 3, 4, 99]
    assert costs == [Cost(blocked=0.75, copy=3.5, fence=0.5)]
    assert copy.fence() == 0.0
    copy.work()  # the thread comes at last
    assert len(done) == 6
    copy.after(costs.append)  # of a copy that has ended: told at once
    assert costs[0] is costs[1]


def test_a_fence_waits_for_the_piece_that_another_has_begun() -> None:
    begun, go, fenced = threading.Event(), threading.Event(), threading.Event()
    told: list[str] = []

    def slow() -> None:
        begun.set()
        assert go.wait(DEADLINE)

    copy = Copy([slow, fenced.set], lambda: told.append("sealed"))
    copy.after(lambda cost: told.append(f"fence {cost.fence > 0}"))
    thread = threading.Thread(target=copy.work)
    thread.start()
    assert begun.wait(DEADLINE)
    waiter = threading.Thread(target=lambda: told.append(f"waited {copy.fence() > 0}"))
    waiter.start()
    assert fenced.wait(DEADLINE)  # it took the other piece, and waits now
    assert told == []
    go.set()
    waiter.join(DEADLINE)
    thread.join(DEADLINE)
    assert told == ["sealed", "fence True", "waited True"]


def test_a_copy_that_ends_in_time_costs_no_fence() -> None:
    costs: list[Cost] = []
    copy = Copy([lambda: None], lambda: None, clock(1.0, 4.0).__next__)
    copy.after(costs.append)
    copy.work()
    assert copy.fence() == 0.0
    assert costs == [Cost(blocked=0.0, copy=3.0, fence=0.0)]


def test_a_piece_that_fails_seals_nothing_and_hangs_nobody() -> None:
    def fail() -> None:
        raise RuntimeError("the toy broke")

    costs: list[Cost] = []
    copy = Copy([fail, lambda: None], pytest.fail)
    copy.after(costs.append)
    copy.fence()
    assert [str(cost.error) for cost in costs] == ["the toy broke"]


def test_nothing_to_copy_is_whole_at_once() -> None:
    sealed: list[bool] = []
    copy = Copy([], lambda: sealed.append(True))
    assert copy.ended
    assert sealed == [True]


def test_every_piece_is_copied_once_whoever_takes_it() -> None:
    for _ in range(50):
        counts = [0] * 64

        def take(n: int, counts: list[int] = counts) -> None:
            counts[n] += 1

        ends: list[int] = []
        copy = Copy(
            [lambda n=n: take(n) for n in range(64)], lambda ends=ends: ends.append(1)
        )  # fmt: skip
        threads = [threading.Thread(target=copy.work) for _ in range(3)]
        for thread in threads:
            thread.start()
        copy.fence()
        assert counts == [1] * 64
        assert ends == [1]
        for thread in threads:
            thread.join(DEADLINE)
