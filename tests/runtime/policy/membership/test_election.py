"""What an agent without a coordinator says that it lacks."""

from __future__ import annotations

import pytest

from holdfast.policy.membership.election import (
    AgentState,
    ElectionTimeouts,
    PreVoteReply,
    Role,
    lacked_majority,
)

UNKNOWN, MISSES = PreVoteReply.UNKNOWN, PreVoteReply.MISSES_LEADER
HEARS, DEAD = PreVoteReply.HEARS_LEADER, PreVoteReply.DEAD


@pytest.mark.parametrize(
    ("replies", "reached"),
    [
        ({"b": UNKNOWN}, "a"),
        ({"b": DEAD}, ""),
        ({"b": UNKNOWN, "c": MISSES}, ""),
        ({"b": UNKNOWN, "c": UNKNOWN, "d": MISSES}, "ad"),
        ({"b": UNKNOWN, "c": HEARS}, ""),
    ],
)
def test_a_rest_without_a_majority_says_what_it_reaches_and_how_long_it_waits(
    replies: dict[str, PreVoteReply], reached: str
) -> None:
    members = ("a", *replies)
    state = AgentState("a", Role.PRE_CANDIDATE, 1, "b", 1, 1, members, 10.0, 1)
    found = lacked_majority(state, replies, 14.0, ElectionTimeouts(6.0, 1.0, 20.0))
    assert ("" if found is None else "".join(found.reached)) == reached
    assert found is None or (found.members == members and found.wait_s == 16.0)
