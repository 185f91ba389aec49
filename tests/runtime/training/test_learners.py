"""Learners of `outer`: a round has the same bits for any number of workers, and is DiLoCo's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from holdfast.config.run import RunConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.fragments import fragment_of
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.free_learners import FreeLearnerExecutor
from holdfast.training.engine.learners import LearnerExecutor
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values, wait_until
from tests.support.tiny_training import Fed, engine, feed, one_step, tiny, train

ROUNDS = 3
LEARNERS: dict[str, Any] = {"learners": 3, "every_steps": 2}
FRAGMENTS: dict[str, Any] = {"every_steps": 4, "fragments": 2}
OVERLAP: dict[str, Any] = {"overlap_steps": 1, "overlap_alpha": 0.3}


def _weights(made: StepEngine) -> str:
    found = hashlib.sha256()
    for local in made.state():
        if not local.name.startswith("learners."):
            found.update(local.tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _rounds(rank: RankContext, **changes: Any) -> list[str]:
    config = tiny(**changes)
    made = engine(config, rank.rank, rank.store(), replicas=rank.world_size)
    verdicts = train(made, ROUNDS)
    assert verdicts[-1].mean_loss < verdicts[0].mean_loss
    said = [f"{v.mean_loss.hex()} {v.norm.hex()} {v.tokens}" for v in verdicts]
    found = [*said, _weights(made)]
    made.close()
    return found


@pytest.mark.parametrize(
    "changes",
    [
        in_campaign({"outer": LEARNERS}),
        {
            "outer": LEARNERS | {"average": "token_weighted", "optimizer": {"name": "sgd"}},
            "train__precision": "bf16",
        },
        {"outer": LEARNERS, "train__optimizer": {"name": "muon", "clip_norm": 0.05}},
        in_campaign({"outer": LEARNERS | {"codec": {"name": "int4"}}}),
        {"outer": LEARNERS | {"average": "median"}},
        {"outer": LEARNERS | {"codec": {"name": "powersgd", "rank": 2}}},
        {"outer": LEARNERS | {"average": "rda", "codec": {"name": "int2"}}},
        {"outer": LEARNERS | {"codec": {"name": "topk", "share": 0.1}}},
        in_campaign({"outer": LEARNERS | FRAGMENTS}),
        in_campaign({"outer": LEARNERS | {"overlap_steps": 1}}),
        {
            "outer": LEARNERS | FRAGMENTS | OVERLAP | {"codec": {"name": "int4"}, "average": "rda"},
            "train__precision": "bf16",
        },
    ],
)
def test_a_round_has_the_same_bits_for_any_number_of_workers(changes: dict[str, Any]) -> None:
    changed = {key: value for key, value in changes.items() if key != "outer"}
    found = {
        tuple(values)
        for workers in (1, 2, 4)
        for values in rank_values(_in_world, workers, {"outer": changes["outer"], "more": changed})
    }
    assert len(found) == 1


def _in_world(rank: RankContext, outer: dict[str, Any], more: dict[str, Any]) -> list[str]:
    return _rounds(rank, **{f"outer__{key}": value for key, value in outer.items()}, **more)


def _alone(config: RunConfig, rank: RankContext, name: str) -> StepEngine:
    return engine(config, rank.rank, rank.store(name))


def _difference(one: StepEngine, other: StepEngine) -> float:
    pairs = zip(one.parameters.master_tensors, other.parameters.master_tensors, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def _one_inner_step(rank: RankContext) -> float:
    """Learners that take one step of SGD, weighted by tokens, are data parallelism."""
    optimizer = {"name": "sgd", "momentum": 0.0, "learning_rate": 0.5, "clip_norm": 0.0}
    shared: dict[str, Any] = {"train__precision": "float64", "train__optimizer": optimizer}
    plain = _alone(tiny(train__microbatch_size=8, **shared), rank, "plain")
    outer = {
        "outer__learners": 3,
        "outer__every_steps": 1,
        "outer__average": "token_weighted",
        "outer__optimizer": {"name": "sgd", "learning_rate": 1.0},
    }
    learners = _alone(tiny(**outer, **shared), rank, "learners")
    train(plain, ROUNDS)
    train(learners, ROUNDS)
    return _difference(plain, learners)


def test_learners_of_one_inner_step_are_data_parallelism() -> None:
    (difference,) = rank_values(_one_inner_step, 1)
    assert difference < 1e-12


def _one_learner(rank: RankContext, fragments: int = 1) -> float:
    """One learner whose change is applied as it is takes the steps of a run without rounds. With
    fragments, each has the values of the round that exchanged it last."""
    every, shared = 2, {"train__precision": "float64", "train__batch_size": 4}
    schedule = {"kind": "linear", "warmup_steps": 4}
    steps = {"train__steps": ROUNDS * every, "train__schedule": schedule}
    plain = _alone(tiny(**steps, **shared), rank, "plain")
    outer = {
        "outer__learners": 1,
        "outer__every_steps": every * fragments,
        "outer__fragments": fragments,
        "outer__optimizer": {"name": "sgd", "learning_rate": 1.0},
        "train__steps": ROUNDS,
        "train__schedule": schedule | {"warmup_steps": 4 // every},
    }
    learner = _alone(tiny(**outer, **shared), rank, "learner")
    number_of = fragment_of(learner.parameters.table, fragments)
    exchanged: dict[str, torch.Tensor] = {}
    for number in range(1, ROUNDS + 1):
        first = (number - 1) * every + 1
        for step in range(first, first + every):
            one_step(plain, step)
        fed = [feed(step, leaf) for step in range(first, first + every) for leaf in range(2)]
        learner.begin(number)
        learner.compute([_joined(fed)])
        learner.apply(learner.reduce())
        exchanged |= {
            row.name: tensor.clone()
            for row, tensor in zip(
                plain.parameters.table, plain.parameters.master_tensors, strict=True
            )
            if number_of[row.name] == (number - 1) % fragments
        }
    assert learner.shown_rate(ROUNDS) == plain.learning_rate(ROUNDS * every)
    pairs = zip(learner.parameters.table, learner.parameters.master_tensors, strict=True)
    return max(float((exchanged[row.name] - tensor).abs().max()) for row, tensor in pairs)


def _joined(fed: list[Fed]) -> Fed:
    inputs, targets = (
        torch.cat([getattr(one, name) for one in fed]) for name in ("inputs", "targets")
    )
    return replace(fed[0], inputs=inputs, targets=targets, tokens=sum(one.tokens for one in fed))


@pytest.mark.parametrize("fragments", [1, 2])
def test_one_learner_takes_the_steps_of_a_run_without_rounds(fragments: int) -> None:
    (difference,) = rank_values(_one_learner, 1, {"fragments": fragments})
    assert difference < 1e-12


def _difference_from_the_paper(rank: RankContext, fragments: int) -> float:
    """Streaming DiLoCo (Douillard et al., 2025, algorithm 2) on runs without rounds, one inner step
    after the other. Fragment p is sent at steps (p+1) H/F - tau, and received tau later."""
    learners, every, tau, alpha, rounds = 2, 3 * fragments, 2, 0.3, 2 * fragments + 1
    rate, momentum, inner = 0.6, 0.8, every // fragments
    schedule = {"kind": "constant", "warmup_steps": 0}
    shared = {"train__precision": "float64", "train__schedule": schedule}
    plain = [
        _alone(tiny(train__batch_size=4, **shared), rank, f"plain {m}") for m in range(learners)
    ]
    outer = {
        "outer__learners": learners,
        "outer__every_steps": every,
        "outer__fragments": fragments,
        "outer__overlap_steps": tau,
        "outer__overlap_alpha": alpha,
        "outer__optimizer": {"name": "nesterov", "learning_rate": rate, "momentum": momentum},
    }
    batch = {"train__batch_size": 4 * learners}
    made = _alone(tiny(**outer, **shared, **batch), rank, "learners")
    own = [run.parameters.master_tensors for run in plain]
    weights = [tensor.clone() for tensor in own[0]]
    speeds, sent = [torch.zeros_like(t) for t in weights], dict[int, list[torch.Tensor]]()
    number_of = fragment_of(made.parameters.table, fragments)
    numbers = [number_of[row.name] for row in made.parameters.table]
    for t in range(1, rounds * inner + 1):
        for m, run in enumerate(plain):
            run.begin(t)
            run.compute([feed(t, 2 * m + leaf) for leaf in range(2)])
            run.apply(run.reduce())
        for p in range(fragments):
            places = [i for i, number in enumerate(numbers) if number == p]
            if (t - (p + 1) * inner + tau) % every == 0:
                sent[p] = [sum(weights[i] - w[i] for w in own) / learners for i in places]
            if (t - (p + 1) * inner) % every == 0:
                for i, change in zip(places, sent[p], strict=True):
                    speeds[i] = momentum * speeds[i] + change
                    weights[i] = weights[i] - rate * (change + momentum * speeds[i])
                    for w in own:
                        w[i].copy_(alpha * w[i] + (1 - alpha) * weights[i])
    for number in range(1, rounds + 1):
        steps = range((number - 1) * inner + 1, number * inner + 1)
        made.begin(number)
        made.compute(
            [
                _joined([feed(t, 2 * m + leaf) for t in steps for leaf in range(2)])
                for m in range(learners)
            ]
        )
        made.apply(made.reduce())
    pairs = zip(made.parameters.master_tensors, weights, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("fragments", [1, 2])
def test_overlap_is_that_of_streaming_diloco(fragments: int) -> None:
    (difference,) = rank_values(_difference_from_the_paper, 1, {"fragments": fragments})
    assert difference < 1e-12


def _summed_before_the_end(rank: RankContext) -> bool:
    """Each rank begins the last inner step of a round once the sum has begun."""
    outer = LEARNERS | OVERLAP | {"learners": 2, "every_steps": 3}
    config = tiny(**{f"outer__{key}": value for key, value in outer.items()})
    made = engine(config, rank.rank, rank.store(), replicas=rank.world_size)
    learners, calls = made.learners, count(1)
    assert isinstance(learners, LearnerExecutor)

    def wait_for_changes() -> None:
        if next(calls) % 3 == 2:
            wait_until(lambda: made.is_summed, 120, "the changes")

    learners.on_progress = wait_for_changes
    train(made, ROUNDS)
    made.close()
    return True


def test_changes_travel_while_the_last_inner_steps_run() -> None:
    assert rank_values(_summed_before_the_end, 2) == [True, True]


def test_fragments_are_even_and_keep_blocks_together() -> None:
    rows = decoder_parameters(ModelConfig.model_validate({"preset": "small", "layers": 24}))
    found = fragment_of(rows, 4)
    sizes = [sum(row.size for row in rows if found[row.name] == number) for number in range(4)]
    assert max(sizes) <= 1.1 * sum(sizes) / 4
    blocks = {name.split(".")[1]: number for name, number in found.items() if "layers." in name}
    assert all(
        number == blocks[name.split(".")[1]] for name, number in found.items() if "layers." in name
    )


FREE = LEARNERS | {"every_steps": 4, "mode": "free", "average": "token_weighted"}


def _free_rounds(rank: RankContext, outer: dict[str, Any], late: list[int]) -> list[Any]:
    """late: the rank that in each round waits for the close after two inner steps."""
    config = tiny(**{f"outer__{key}": value for key, value in outer.items()})
    made, found = engine(config, rank.rank, rank.store(), replicas=rank.world_size), list[Any]()
    learners = made.learners
    assert isinstance(learners, FreeLearnerExecutor)
    for step, slow in enumerate(late, 1):
        calls = count(1)

        def wait_for_close(slow: int = slow, calls: Iterator[int] = calls) -> None:
            if rank.rank == slow and next(calls) == 2:
                wait_until(lambda: learners._stops(0, 0), 120, "the close")

        learners.on_progress = wait_for_close
        verdict = one_step(made, step)
        found.append([_weights(made), [row.to_json() for row in learners.fates], verdict.tokens])
    made.close()
    return found


def _replayed(rank: RankContext, outer: dict[str, Any], rounds: list[Any]) -> list[Any]:
    config = tiny(**{f"outer__{key}": value for key, value in outer.items()})
    made, found = engine(config, rank.rank, rank.store()), list[Any]()
    assert isinstance(made.learners, FreeLearnerExecutor)
    steps = {n: [row["steps"] for row in rows] for n, (_, rows, _) in enumerate(rounds, 1)}
    made.learners.recorded = steps
    for verdict in (one_step(made, step) for step in steps):
        rows = [row.to_json() for row in made.learners.fates]
        found.append([_weights(made), rows, verdict.tokens])
    return found


@pytest.mark.parametrize(
    ("late", "codec", "fate"),
    [("drop", {}, "dropped"), ("use", {"name": "int4"}, "used_late"), ("discount", {}, "late")],
)
def test_one_process_computes_the_rounds_of_mode_free_again(
    late: str, codec: dict[str, Any], fate: str
) -> None:
    quorum = {"quorum": 2, "grace_seconds": 0.0}
    outer = FREE | {"free": quorum | {"late": late}, "codec": codec}
    by_rank = rank_values(_free_rounds, 3, {"outer": outer, "late": [2, 0, 1, 2]})
    assert all(rounds == by_rank[0] for rounds in by_rank)
    rounds = by_rank[0]
    assert [[row["fate"] for row in rows].count(fate) for _, rows, _ in rounds] == [1] * 4
    assert len({weights for weights, _, _ in rounds}) == 4, "the weights move in each round"
    assert rank_values(_replayed, 1, {"outer": outer, "rounds": rounds}) == [rounds]


def _late_change_differs_by(rank: RankContext) -> float:
    """The round after one with a late change is the weighted mean of the changes of that round and
    the late one. Each of the two is known from a run that has the other not."""
    sgd = {"name": "sgd", "learning_rate": 1.0}
    inner = {"name": "sgd", "learning_rate": 0.5, "momentum": 0.0, "clip_norm": 0.0}

    def run(name: str, late: str, rounds: dict[int, list[int]]) -> tuple[list[Any], list[Any]]:
        outer = FREE | {"free": {"late": late}, "optimizer": sgd}
        more = {"train__precision": "float64", "train__optimizer": inner}
        made = _alone(tiny(**{f"outer__{k}": v for k, v in outer.items()}, **more), rank, name)
        assert isinstance(made.learners, FreeLearnerExecutor)
        made.learners.recorded = rounds
        weights = [[t.clone() for t in made.parameters.master_tensors]]
        for step in rounds:
            one_step(made, step)
            weights.append([t.clone() for t in made.parameters.master_tensors])
        return weights, list(made.learners.fates)

    first, second = [4, 2, 4], [4, 4, 4]
    found, fates = run("discount", "discount", {1: first, 2: second})
    plain, _ = run("drop", "drop", {1: first, 2: second})
    alone, late_fates = run("use", "use", {1: [0, 2, 0]})
    tokens, late = sum(row.tokens for row in fates), 0.5 * late_fates[1].tokens
    differences = [
        (before - after) * (tokens + late) - (before - without) * tokens - late * (start - moved)
        for before, after, without, start, moved in zip(
            found[1], found[2], plain[2], alone[0], alone[1], strict=True
        )
    ]
    return max(float(d.abs().max()) for d in differences) / tokens


def test_a_late_change_counts_in_the_next_round_with_its_discount() -> None:
    (difference,) = rank_values(_late_change_differs_by, 1)
    assert difference < 1e-8  # changes travel in fp32
