"""`holdfast layout distance`: what far messages cost against near ones."""

from __future__ import annotations

import json

from tests.support.commands import within


def test_the_table_says_from_where_on_the_distance_is_a_hundredfold() -> None:
    done = within("layout", "distance", "--ranks", "16")
    assert done.code == 0
    assert "a hundred times dearer between zones: from 1.0 MiB" in done.out
    assert "a hundred times dearer between racks" not in done.out


def test_ratios_are_of_times_of_the_same_size() -> None:
    done = within("layout", "distance", "--size", "1000000", "--json")
    rows = json.loads(done.out)
    near = rows[0]
    assert near["level"] == "node"
    for row in rows:
        assert row["ring_ratio"] == row["ring_s"] / near["ring_s"]
        assert row["message_ratio"] == row["message_s"] / near["message_s"]


def test_a_message_without_bytes_is_refused() -> None:
    done = within("layout", "distance", "--size", "0")
    assert done.code == 2
    assert done.err.count("\n") == 1
