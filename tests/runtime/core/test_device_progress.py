"""The device that the rest waits for, by counts of exchanges."""

from __future__ import annotations

from holdfast.core.device_progress import GroupProgress, find_late_devices


def at(group: str, reached: int, done: int) -> GroupProgress:
    return GroupProgress(group, 9, reached, done)


def test_a_device_that_waits_in_another_exchange_is_not_late() -> None:
    """Rank 2 waits for rank 1 in a group of two, so it does not come to that of all."""
    found = find_late_devices(
        {
            0: [at("all", 4, 3)],
            1: [at("all", 3, 3), at("two", 5, 5)],
            2: [at("all", 3, 3), at("two", 6, 5)],
        }
    )
    assert found == {1: at("all", 3, 3)}


def test_nothing_is_known_of_ranks_that_tell_nothing_or_the_same() -> None:
    assert find_late_devices({}) == find_late_devices({0: [], 1: []}) == {}
    assert find_late_devices({0: [at("all", 4, 3)], 1: [at("all", 4, 3)]}) == {}
    assert find_late_devices({0: [at("one", 4, 3)], 1: [at("other", 2, 2)]}) == {}


def test_counts_travel_as_rows() -> None:
    rows = [at("all", 4, 3).to_json()]
    assert tuple(map(GroupProgress.from_json, rows)) == (at("all", 4, 3),)
