"""Which nodes may compute one run together, which links fail, and how often a run restarts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.policy.membership.link_health import FLAP_WINDOW_S, LinkHealth, link_observed
from holdfast.policy.membership.node_identity import (
    JoinVerdict,
    LikeProcessors,
    NodeIdentity,
    judge_joiner,
)
from holdfast.policy.membership.restart_budget import RestartHistory, why_give_up

OURS = NodeIdentity(
    "c0de", "2.13.0 (build 1)", {"layout.reduction": "tree"}, {"vector units": "avx2"}, "beef"
)


def _judge(theirs: NodeIdentity, rule: LikeProcessors = "warn") -> JoinVerdict:
    return judge_joiner(OURS, theirs, "a", "b", rule)


def test_alike_nodes_join_without_a_word() -> None:
    assert _judge(OURS) == JoinVerdict()


@pytest.mark.parametrize(
    ("theirs", "both"),
    [
        (replace(OURS, code="beaf"), ("beaf", "c0de")),
        (replace(OURS, torch="2.12.1 (build 1)"), ("2.12.1", "2.13.0")),
        (replace(OURS, torch="2.13.0 (build 2)"), ("build 2", "build 1")),
        (replace(OURS, settings={"layout.reduction": "fast"}), ("fast on b", "tree on a")),
    ],
)
@pytest.mark.parametrize("rule", ["warn", "require", "ignore"])
def test_other_code_torch_or_settings_are_refused_with_both_values(
    theirs: NodeIdentity, both: tuple[str, str], rule: LikeProcessors
) -> None:
    refusal = _judge(theirs, rule).refusal
    assert all(value in refusal for value in both)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (replace(OURS, processor={"vector units": "avx2 avx512f"}), "avx2 avx512f"),
        (
            replace(OURS, processor={"vector units": "avx2", "MKL_CBWR": "SSE4_2"}),
            "MKL_CBWR SSE4_2, a with unset",
        ),
        (replace(OURS, reference="f00d"), "gives f00d there, beef here"),
    ],
)
def test_another_processor_is_for_the_run_file_to_judge(theirs: NodeIdentity, words: str) -> None:
    warned = _judge(theirs, "warn")
    assert not warned.refusal
    assert words in warned.warning
    assert words in _judge(theirs, "require").refusal
    assert _judge(theirs, "ignore") == JoinVerdict()


def test_an_older_agent_that_sends_nothing_joins() -> None:
    assert _judge(NodeIdentity.from_json({})) == JoinVerdict()
    assert NodeIdentity.from_json(OURS.to_json()) == OURS


# --- a leader's link that keeps failing, against one that fails once ------------------------------
LOOK_S = 2.0


def _seen(looks: str) -> LinkHealth:
    """One look each two seconds: + is up, - is down."""
    link = LinkHealth()
    for number, look in enumerate(looks):
        link = link_observed(link, look == "+", number * LOOK_S)
    return link


@pytest.mark.parametrize(
    ("looks", "is_flapping"),
    [
        ("+++++", False),
        ("+-+-+", False),
        ("+-+-+-+", True),
        ("+--+---+-+", True),
        ("+-+-+-", False),  # it is away: the term cannot be closed
        ("-" * 60 + "+", False),  # one long outage
        ("+-+" + "+" * 30 + "-+-+", False),  # the first outage is older than a minute
    ],
)
def test_three_outages_within_a_minute_that_ended(looks: str, is_flapping: bool) -> None:
    assert _seen(looks).is_flapping is is_flapping


def test_outages_are_forgotten_after_the_window() -> None:
    link = _seen("+-+-+-+")
    assert not link_observed(link, True, 6 * LOOK_S + FLAP_WINDOW_S).is_flapping


# --- how often a run restarts ---------------------------------------------------------------------
def _lose(committed: list[int], limit: int) -> list[str | None]:
    restarts, said = RestartHistory(), []
    for step in committed:
        restarts = restarts.with_loss(step)
        said.append(why_give_up(restarts, limit, "SIGKILL"))
    return said


def test_losses_without_progress_are_counted_to_the_limit() -> None:
    said = _lose([0, 0, 0, 0], limit=3)
    assert said[:3] == [None, None, None]
    assert said[3] is not None
    assert "restarted 3 times" in said[3]
    assert "SIGKILL" in said[3]
    assert "cluster.max_restarts_without_progress=3" in said[3]


def test_every_newer_commit_starts_the_count_again() -> None:
    assert _lose([0, 0, 10, 10, 20, 20, 30], limit=2) == [None] * 7
    said = _lose([10, 10, 10], limit=2)
    assert said[:2] == [None, None]
    assert said[2] is not None
    assert "beyond step 10" in said[2]


def test_a_limit_of_zero_never_restarts() -> None:
    assert _lose([50], limit=0)[0] is not None


def test_a_thousand_losses_with_progress_are_no_reason() -> None:
    assert not any(_lose(list(range(1, 1001)), limit=1))


def _fail(causes: list[str], committed: int = 0) -> list[str | None]:
    restarts, said = RestartHistory(), []
    for cause in causes:
        restarts = restarts.with_loss(committed, cause)
        said.append(why_give_up(restarts, 3, cause))
    return said


def test_the_same_failure_before_the_first_step_ends_the_run_the_second_time() -> None:
    first = "worker 0: RuntimeError: [alloc.cpp:118] cannot allocate 123 bytes at 0x7f00"
    again = "worker 1: RuntimeError: [alloc.cpp:118] cannot allocate 456 bytes at 0x7e00"
    said = _fail([first, again])
    sentence = "gave up: no step was done, and two starts failed alike; the cause was: "
    assert said == [None, sentence + again]


def test_what_may_pass_is_tried_as_often_as_the_run_file_says() -> None:
    for cause in ("worker 0: SIGKILL", "worker 0: ConnectionResetError: x", "the mover ended"):
        assert _fail([cause] * 3) == [None] * 3
    other = ["worker 0: ValueError: a", "worker 0: ValueError: b", "worker 0: ValueError: a"]
    assert _fail(other) == [None] * 3
    assert _fail(["worker 0: ValueError: a"] * 3, committed=5) == [None] * 3
