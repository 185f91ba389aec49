"""`outer.trust`: each cheater is named, honest learners never are, and what is left out has not
happened. Real ranks over gloo."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.core.seeds import key_seed
from holdfast.errors import MismatchError
from holdfast.events import ChangeLeftOut, Event, LearnerChecked
from holdfast.parallel.outer.trust import Verdict, choose_checkers, draw_checks, find_outliers
from holdfast.training.engine.checked_learners import CheckedLearners
from holdfast.training.engine.engine import StepEngine
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import engine, feed, one_step, tiny

ROUNDS, LEARNERS = 3, 4
Told = list[dict[str, Any]]
"""Events as values."""
OUTER: dict[str, Any] = {"outer__learners": LEARNERS, "outer__every_steps": 2}


def _weights(made: StepEngine) -> str:
    found = hashlib.sha256()
    for local in made.state():
        if not local.name.startswith(("learners.", "outer.")):
            found.update(local.tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _rounds(
    rank: RankContext, changes: dict[str, Any], cheat: str = "", cheater: int = 1, liar: int = -1
) -> tuple[str, Told]:
    """Train ROUNDS rounds; the hash of the weights, and all events of this rank."""
    config = tiny(**OUTER | changes)
    made = engine(config, rank.rank, rank.store(), replicas=rank.world_size)
    learners, events = made.learners, Told()
    if isinstance(learners, CheckedLearners):
        size = made.train.microbatch_size
        learners.fetch = lambda step, leaf: feed(step, leaf, size)
        if cheat and rank.rank == cheater:
            _cheat(learners, cheat)
        if rank.rank == liar:
            honest = learners._recompute
            lying: Any = lambda *which: (honest(*which), Verdict.DIFFERS)[1]  # noqa: E731
            learners._recompute = lying  # type: ignore[method-assign]
    for step in range(1, ROUNDS + 1):
        one_step(made, step)
        events += [] if learners is None else _told(learners.events())
    found = _weights(made)
    made.close()
    return found, events


def _cheat(learners: Any, cheat: str) -> None:
    """Let the rank send wrong changes of its own learners, and compute those of rank 0 honestly."""
    honest, own = learners._changes, learners._own

    def changes(tokens: float) -> list[torch.Tensor]:
        found = honest(tokens)
        if learners._own is not own:  # it checks another rank's learner
            return found
        match cheat:
            case "no work":
                return [torch.zeros_like(t) for t in found]
            case "one bit":
                found[0].view(-1)[0] = torch.nextafter(found[0].view(-1)[0], torch.tensor(9.0))
            case "sign x 10":
                return [-10 * t for t in found]
            case "NaN":
                found[0].view(-1)[0] = torch.nan
        return found

    learners._changes = changes
    if cheat == "state":
        commit = learners.commit

        def committed() -> None:
            commit()
            for tensor in (t for states in learners._states for t in states):
                if tensor is not None:
                    tensor.add_(1e-3)

        learners.commit = committed


def _told(events: Iterable[Event]) -> Told:
    return [{"of": type(event).__name__, **asdict(event)} for event in events]


def _of(events: list[Told], kind: type[Event]) -> list[Any]:
    found = [SimpleNamespace(**event) for of_rank in events for event in of_rank]
    return [event for event in found if event.of == kind.__name__]


@pytest.mark.parametrize("codec", [in_campaign("none"), "int2"])
def test_checks_of_honest_ranks_change_no_bit_and_name_none(codec: str) -> None:
    changes = {"outer__codec": {"name": codec}}
    (plain,) = rank_values(_rounds, 1, {"changes": changes})
    found = rank_values(_rounds, 3, {"changes": changes | {"outer__trust": {"checks": 1.0}}})
    assert {weights for weights, _ in found} == {plain[0]}
    events = [events for _, events in found]
    checks = _of(events, LearnerChecked)
    assert [check.verdict for check in checks] == ["equal"] * (LEARNERS * ROUNDS)
    assert all(check.checker != check.rank for check in checks)
    assert not _of(events, ChangeLeftOut)


@pytest.mark.parametrize(
    "cheat", [*map(in_campaign, ("no work", "sign x 10")), "one bit", "NaN", "state"]
)
def test_a_check_names_each_cheat_and_the_rest_stay_equal(cheat: str) -> None:
    changes = {"outer__trust": {"checks": 1.0}}
    found = rank_values(_rounds, 2, {"changes": changes, "cheat": cheat})
    assert len({weights for weights, _ in found}) == 1
    out = _of([events for _, events in found], ChangeLeftOut)
    first = 2 if cheat == "state" else 1  # the state is wrong after the first round
    due = [(step, learner) for step in range(first, ROUNDS + 1) for learner in (2, 3)]
    assert sorted((event.step, event.learner) for event in out) == due
    assert {event.rank for event in out} == {1}
    assert max(event.count for event in out) == len(due) // 2


def test_a_third_rank_overrules_a_checker_that_lies() -> None:
    changes: dict[str, Any] = {"outer__codec": {"name": "int2"}}
    (plain,) = rank_values(_rounds, 1, {"changes": changes})
    trust = {"outer__trust": {"checks": 1.0}}
    found = rank_values(_rounds, 3, {"changes": changes | trust, "liar": 2})
    assert {weights for weights, _ in found} == {plain[0]}
    events = [events for _, events in found]
    assert not _of(events, ChangeLeftOut)
    wrong = [e for e in _of(events, LearnerChecked) if e.verdict == "differs"]
    right = [e for e in _of(events, LearnerChecked) if e.overruled]
    assert wrong
    assert {e.checker for e in wrong} == {2}
    assert [(e.step, e.learner) for e in right] == [(e.step, e.learner) for e in wrong]
    assert all(e.verdict == "equal" and e.overruled == [2] for e in right)


def _mismatch(rank: RankContext) -> str:
    try:
        _rounds(rank, {"outer__trust": {"checks": 1.0, "on_mismatch": "stop"}}, "one bit")
    except MismatchError as error:
        return str(error)
    return ""


def test_a_mismatch_stops_all_ranks_and_names_two() -> None:
    for text in rank_values(_mismatch, 2):
        assert "round 1: rank 1 (node) computed learner 2 otherwise than rank 0" in text


def test_a_change_that_makes_other_samples_worse_is_left_out() -> None:
    schedule = {"kind": "constant", "warmup_steps": 0}
    changes = {"outer__trust": {"held_out": 0.003}, "train__schedule": schedule}
    found = rank_values(_rounds, 2, {"changes": changes, "cheat": "sign x 10"})
    out = _of([events for _, events in found], ChangeLeftOut)
    assert [(e.step, e.learner, e.rank) for e in out] == [
        (step, learner, 1) for step in range(1, ROUNDS + 1) for learner in (2, 3)
    ]
    assert len({weights for weights, _ in found}) == 1


@pytest.mark.parametrize(
    ("cheat", "trust"), [("sign x 10", {"norm": 3.0}), ("no work", {"norm": 3.0})]
)
def test_a_bound_leaves_out_what_is_far_from_the_rest(cheat: str, trust: dict[str, float]) -> None:
    changes = {"outer__trust": trust, "outer__average": "mean"}
    found = rank_values(_rounds, 4, {"changes": changes, "cheat": cheat})
    out = _of([events for _, events in found], ChangeLeftOut)
    assert [(event.learner, event.rank) for event in out] == [(1, 1)] * ROUNDS
    assert len({weights for weights, _ in found}) == 1


def test_a_learner_that_reached_the_limit_counts_again_after_a_check() -> None:
    changes = {"outer__trust": {"checks": 1e-9, "norm": 3.0, "limit": 1}}
    found = rank_values(_one_bad_round, 2, {"changes": changes})
    events = [events for _, events in found]
    assert [(e.step, e.learner) for e in _of(events, ChangeLeftOut)] == [(1, 2), (1, 3)]
    checks = [(e.step, e.learner, e.verdict) for e in _of(events, LearnerChecked)]
    assert sorted(checks) == [(2, 2, "equal"), (2, 3, "equal")]


def _one_bad_round(rank: RankContext, changes: dict[str, Any]) -> tuple[str, Told]:
    """Rank 1 computes nonsense in round 1 alone. Eight learners, so that the median is honest."""
    config = tiny(**OUTER | changes | {"outer__learners": 8, "train__microbatch_size": 3})
    made = engine(config, rank.rank, rank.store(), replicas=rank.world_size)
    learners, events = made.learners, Told()
    assert isinstance(learners, CheckedLearners)
    learners.fetch = lambda step, leaf: feed(step, leaf, made.train.microbatch_size)
    honest: Any = learners._changes
    turn, bad = iter(range(10**6)), {2, 3} if rank.rank == 0 else set()

    def changes_of(tokens: float) -> list[torch.Tensor]:
        found: list[torch.Tensor] = honest(tokens)
        return [-10 * t for t in found] if next(turn) in bad else found

    learners._changes = changes_of  # type: ignore[method-assign]
    for step in range(1, ROUNDS + 1):
        one_step(made, step)
        events += _told(learners.events())
    made.close()
    return "", events


def test_draws_are_as_frequent_as_they_should_be_and_depend_on_what_was_sent() -> None:
    rounds, learners, share = 3000, 8, 0.1
    sent = [[[key_seed(1, "sent", step, k)] for k in range(learners)] for step in range(rounds)]
    drawn = [draw_checks(1, step, words, share, ()) for step, words in enumerate(sent)]
    gap = rounds * learners / sum(map(len, drawn))
    assert gap == pytest.approx(1 / share, rel=0.1), "mean rounds until a learner is checked"
    other = [draw_checks(1, s, [*words[1:], [5]], share, ()) for s, words in enumerate(sent)]
    assert drawn != other
    assert draw_checks(1, 1, sent[1], 0.0, {3, 5}) == [3, 5]


def test_a_checker_has_a_like_processor_and_is_never_the_owner() -> None:
    owners, processors = [0, 0, 1, 1, 2, 2], [7, 7, 8]
    chosen = choose_checkers(1, 4, range(6), owners, processors)
    assert chosen == {0: 1, 1: 1, 2: 0, 3: 0, 4: None, 5: None}


def test_outliers_of_norm_and_direction_are_named() -> None:
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(500, generator=generator)
    changes = [common + 0.5 * torch.randn(500, generator=generator) for _ in range(8)]
    assert find_outliers(changes, 3.0, 0.0) == {}
    changes[1], changes[4], changes[6] = changes[1] * 10, -changes[4], changes[6] * torch.nan
    found = find_outliers(changes, 3.0, 0.0)
    assert sorted(found) == [1, 4, 6]
    assert "norm" in found[1]
    assert "cosine" in found[4]
    assert found[6] == "not finite"
