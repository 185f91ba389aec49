"""What waits on a line: in order, late, and no more than the line carries."""

from __future__ import annotations

import pytest

from holdfast_lab.chaos.relay import LineDirection, LinkShape


def test_a_packet_comes_after_its_delay_and_the_time_of_its_bits() -> None:
    line, shape = LineDirection(), LinkShape(delay_s=0.5, gbit_per_s=8e-6)  # 1,000 bytes a second
    line.push(b"x" * 100, 10.0, shape)
    line.push(b"y" * 100, 10.0, shape)
    assert line.next_due == pytest.approx(10.6)
    assert line.pop_due(10.59) == []
    assert line.pop_due(10.61) == [b"x" * 100]
    assert line.next_due == pytest.approx(10.7)
    line.push(b"z", 20.0, shape)
    assert line.pop_due(20.0) == [b"y" * 100], "the line was free again"
    assert line.next_due == pytest.approx(20.501)


def test_a_quicker_shape_lets_no_packet_overtake_another() -> None:
    line = LineDirection()
    line.push(b"first", 0.0, LinkShape(delay_s=1.0))
    line.push(b"second", 0.1, LinkShape())
    assert line.pop_due(0.9) == []
    assert line.pop_due(1.0) == [b"first", b"second"]
    assert line.next_due is None


def test_the_words_of_a_shape_are_those_that_the_relay_reads() -> None:
    shape = LinkShape(delay_s=0.125, loss=0.25, gbit_per_s=5.7)
    assert LinkShape.of(shape.words()) == shape
    assert LinkShape.of(["20", "1"]) == LinkShape(0.02, 0.01)
    assert LinkShape.of([]) == LinkShape()
