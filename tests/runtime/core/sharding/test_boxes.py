"""Box arithmetic on random layouts: any tiling written, any tiling wanted, the same array."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.sharding.boxes import Box, copy_runs, coverage_problem, element_range, whole_box

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def grid_tiling(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut by a random grid; lengths of 0 are among the pieces."""
    edges = []
    for size in shape:
        inner = draw(st.lists(st.integers(0, size), max_size=3))
        edges.append([0, *sorted(inner), size])
    spans = [list(pairwise(e)) for e in edges]
    return [
        Box("t", tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in product(*spans)
    ]


@st.composite
def split_tiling(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut again and again, each piece on a dim of its own: no grid."""
    boxes = [whole_box("t", shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.lengths[dim]))
        for start, length in ((0, at), (at, box.lengths[dim] - at)):
            offsets, lengths = list(box.offsets), list(box.lengths)
            offsets[dim] += start
            lengths[dim] = length
            boxes.append(Box("t", tuple(offsets), tuple(lengths)))
    return boxes


def tilings(shape: tuple[int, ...]) -> st.SearchStrategy[list[Box]]:
    return st.one_of(grid_tiling(shape), split_tiling(shape))


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_tiling_is_restored_from_any_other(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    array = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    stored = [(b, cut(array, b).ravel().copy()) for b in data.draw(tilings(shape))]
    for box in data.draw(tilings(shape)):
        out = np.full(box.size, -1)
        for source, flat in stored:
            last = -1
            for run in copy_runs(source, box):
                assert run.length > 0
                assert run.source > last  # rising, so that a reader may stream
                last = run.source
                out[run.target : run.target + run.length] = flat[
                    run.source : run.source + run.length
                ]
        assert np.array_equal(out, cut(array, box).ravel())


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_coverage_accepts_exactly_the_tilings(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    boxes = data.draw(tilings(shape))
    assert coverage_problem(shape, boxes) is None
    held = [b for b in boxes if b.size]
    victim = data.draw(st.sampled_from(held))
    without = list(held)
    without.remove(victim)
    assert "missing" in (coverage_problem(shape, without) or "")
    assert "twice" in (coverage_problem(shape, [*held, victim]) or "")


def test_coverage_finds_an_overlap_that_hides_a_hole() -> None:
    # As many elements as the tensor has, but rows 2 are held twice and row 3 not at all.
    boxes = [Box("t", (0, 0), (3, 2)), Box("t", (2, 0), (1, 2))]
    assert "twice" in (coverage_problem((4, 2), boxes) or "")


def test_coverage_refuses_what_leaves_the_shape() -> None:
    assert "outside" in (coverage_problem((4,), [Box("t", (1,), (4,))]) or "")
    assert "dims" in (coverage_problem((4,), [Box("t", (0, 0), (4, 1))]) or "")


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        ((-1, 0), (4, 2)),
        ((0, -2), (4, 2)),
        ((0, 0), (-4, -2)),
        ((0,), (4, 2)),
        ((0, 0), (8,)),
        ((0, 0, 0), (4, 2)),
        ((0.0, 0), (4, 2)),
        (("0", 0), (4, 2)),
        ((False, 0), (4, 2)),
    ],
)
def test_coverage_refuses_what_is_no_place(offsets: Any, lengths: Any) -> None:
    """Boxes check nothing themselves; as many elements as the tensor has, all of them."""
    assert coverage_problem((4, 2), [Box("t", offsets, lengths)]) is not None
    assert coverage_problem((4, 2), [Box("t", (0, 0), (4, 2))]) is None


def test_rows_of_a_matrix_are_one_run_and_columns_one_per_row() -> None:
    full = whole_box("t", (6, 5))
    assert [tuple(r) for r in copy_runs(full, Box("t", (2, 0), (3, 5)))] == [(10, 0, 15)]
    assert [r.length for r in copy_runs(full, Box("t", (0, 1), (6, 2)))] == [2] * 6


def test_boxes_of_different_tensors_have_nothing_in_common() -> None:
    assert whole_box("a", (2,)).intersect(whole_box("b", (2,))) is None
    assert whole_box("a", (2,)).intersect(Box("a", (2,), (3,))) is None
    assert list(copy_runs(whole_box("a", (2,)), whole_box("b", (2,)))) == []


@given(SHAPES, st.data())
def test_a_range_of_elements_is_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    values = np.arange(int(np.prod(shape))).reshape(shape)
    offsets = tuple(data.draw(st.integers(0, 9)) for _ in shape)
    start = data.draw(st.integers(0, values.size))
    stop = data.draw(st.integers(start, values.size))
    boxes = list(element_range(Box("t", offsets, shape), start, stop))
    found: list[int] = []
    for box in boxes:
        place = tuple(
            slice(a - o, a - o + n)
            for a, o, n in zip(box.offsets, offsets, box.lengths, strict=True)
        )
        found += values[place].ravel().tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
