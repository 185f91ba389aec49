"""The order of gangs: every interleaving of small cases reaches the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest

from holdfast_platform.clouds.gangs import GangBoard, GangState

Queues = tuple[tuple[int, ...], ...]


def stuck(queues: Queues, needs: dict[int, frozenset[int]]) -> Queues | None:
    """Explore all interleavings of hosts that begin the first gang of their queue and wait inside
    it for all of its hosts. Return a state in which no host can continue, or None."""
    start = (queues, (None,) * len(queues))
    seen, open_states = {start}, [start]
    while open_states:
        held, inside = open_states.pop()
        following = []
        for host, queue in enumerate(held):
            if inside[host] is None and queue:
                following.append((held, (*inside[:host], queue[0], *inside[host + 1 :])))
        for gang, hosts in needs.items():
            if all(inside[host] == gang for host in hosts):
                left = tuple(q[1:] if i in hosts else q for i, q in enumerate(held))
                free = tuple(None if i in hosts else g for i, g in enumerate(inside))
                following.append((left, free))
        if not following and any(held):
            return held
        for state in following:
            if state not in seen:
                seen.add(state)
                open_states.append(state)
    return None


def board(groups: Sequence[int], ahead: int = 2) -> GangBoard:
    found = GangBoard(ahead)
    for group, size in enumerate(groups):
        for number in range(size):
            found.add_host(f"h{group}{number}", f"g{group}")
    return found


CASES = [{"g0": 2, "g1": 1}, {"g0": 2}, {"g0": 1, "g1": 1}, {"g1": 1}]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_no_interleaving_of_queued_gangs_gets_stuck(order: tuple[int, ...]) -> None:
    found = board([2, 1], ahead=4)
    numbers = [found.submit(CASES[i]) for i in order]
    assert found.advance() == numbers
    names = sorted(found.hosts)
    queues = tuple(found.queue_of(name) for name in names)
    needs = {
        number: frozenset(names.index(host) for host in found.gangs[number].hosts)
        for number in numbers
    }
    assert stuck(queues, needs) is None


def test_the_check_finds_queues_without_a_common_order() -> None:
    """Two clients that each append to two hosts, one after the other."""
    both = frozenset({0, 1})
    assert stuck(((0, 1), (1, 0)), {0: both, 1: both}) == ((0, 1), (1, 0))
    assert stuck(((0, 1), (0, 1)), {0: both, 1: both}) is None


def explore(found: GangBoard, path: tuple[tuple[str, ...], ...], submitted: int) -> int:
    """Every order in which hosts begin and end what they hold; the number of ends that were
    reached. `path` is replayed on a fresh board, so that no state needs to be copied."""
    moves = []
    for name in found.hosts:
        queue = found.queue_of(name)
        if queue and name not in found.gangs[queue[0]].begun:
            moves.append(("begin", name))
        elif queue and all(h in found.gangs[queue[0]].begun for h in found.gangs[queue[0]].hosts):
            moves.append(("end", name))
    if not moves:
        states = {gang.state for gang in found.gangs.values()}
        assert states == {GangState.DONE}, (path, found.gangs)
        return 1
    ends = 0
    for move in moves:
        ends += explore(replayed((*path, move), submitted), (*path, move), submitted)
    return ends


def replayed(path: tuple[tuple[str, ...], ...], submitted: int) -> GangBoard:
    found = board([2, 1])
    first = found.submit({"g0": 2})
    second = found.submit({"g0": 1, "g1": 1}, after=[first])
    if submitted > 2:
        found.submit({"g1": 1}, after=[second])
    found.advance()
    for kind, host in path:
        number = found.queue_of(host)[0]
        if kind == "begin":
            found.begin(host, number)
        else:
            found.end(host, number, 0)
            found.advance()
    return found


def test_with_dependencies_and_room_for_two_every_order_of_events_reaches_the_end() -> None:
    assert explore(replayed((), 2), (), 2) > 1
    assert explore(replayed((), 3), (), 3) > 10


def test_a_failed_gang_fails_what_waits_for_it_and_nothing_else() -> None:
    found = board([2])
    first = found.submit({"g0": 1})
    found.submit({"g0": 1}, after=[first])
    found.submit({"g0": 1})
    found.advance()
    found.begin("h00", first)
    found.end("h00", first, 3)
    found.advance()
    assert [gang.state for gang in found.gangs.values()] == ["failed", "failed", "queued"]
    assert "exit code 3 on h00" in found.gangs[0].reason
    assert found.gangs[1].reason == "gang 0 failed, and this one waits for it"


def test_a_lost_host_fails_what_it_has_begun_and_the_rest_is_queued_elsewhere() -> None:
    found = board([2])
    first, second = found.submit({"g0": 1}), found.submit({"g0": 1})
    third = found.submit({"g0": 1})
    found.advance()
    found.begin("h00", first)
    found.lose_host("h00")
    assert found.gangs[first].state == GangState.FAILED
    assert found.gangs[third].state == GangState.WAITING
    found.advance()
    assert found.queue_of("h01") == (second, third)


def test_a_gang_that_may_be_tried_again_is_queued_again_behind_what_is_there() -> None:
    found = board([3])
    gang = found.submit({"g0": 2}, retries=1)
    found.advance()
    for host in ("h00", "h01"):
        found.begin(host, gang)
    found.lose_host("h00")
    assert found.queue_of("h01") == (), "it ends its part of the first attempt"
    assert found.hosts["h01"].queue == [gang], "and is busy until then"
    found.end("h01", gang, 0)
    assert found.advance() == [gang]
    assert found.gangs[gang].hosts == ("h01", "h02")
    assert found.gangs[gang].ended == {}


@pytest.mark.parametrize(("needs", "after"), [({}, ()), ({"g0": 0}, ()), ({"g0": 1}, (7,))])
def test_a_gang_that_cannot_be_is_refused(needs: dict[str, int], after: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="needs hosts"):
        board([1]).submit(needs, after)
