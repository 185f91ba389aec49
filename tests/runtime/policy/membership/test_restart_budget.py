from __future__ import annotations

from holdfast.policy.membership.restart_budget import RestartHistory, why_give_up


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
    assert "beyond committed step 10" in said[2]


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
