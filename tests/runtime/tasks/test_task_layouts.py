"""Promise 1 for models of other people: bit-equal under replicas, 1e-10 under ZeRO."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from holdfast.errors import TaskError
from holdfast.training.engine.evaluate import Evaluator
from tests.support.layouts import assert_all_state, case, load_complete, load_pieces
from tests.support.marks import in_campaign
from tests.support.own_tasks import TaskTraining, task_config, train_task
from tests.support.ranks import RankContext, rank_values, ranks
from tests.support.tiny_training import CPU

TASKS: dict[str, dict[str, Any]] = {
    "Gru": {"hidden": 6},
    "Convolution": {},
    "Normed": {},
    "Tied": {"dropout": 0.2, "sometimes": True},
    "EncoderDecoder": {"dropout": 0.1},
    "Gpt2": {"dropout": 0.1},
    "Weighted": {},
}
WITHOUT_RANDOM: dict[str, dict[str, Any]] = {
    "Gru": {},
    "Convolution": {},
    "Tied": {"dropout": 0.0, "sometimes": False},
    "EncoderDecoder": {"dropout": 0.0},
    "Gpt2": {"dropout": 0.0},
}
"""The tasks that dp_shard may cut."""


def _with_slow(names: Iterable[str], *quick: str) -> list[Any]:
    return [n if n in quick else in_campaign(n) for n in names]


@pytest.mark.parametrize("name", _with_slow(TASKS, "Normed", "EncoderDecoder"))
def test_replicas_change_no_bit(name: str) -> None:
    curves: set[tuple[str, ...]] = set()
    for layout in ("one", "dp3"):
        arguments = {"name": name, "args": TASKS[name], "layout": layout}
        for curve in rank_values(train_task, case(layout).world_size, arguments):
            assert len(set(curve)) == 7
            curves.add(tuple(curve))
    assert len(curves) == 1


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        in_campaign("EncoderDecoder", "one"),
        in_campaign("Gpt2", "one"),
        in_campaign("Gpt2", "shard2"),
        in_campaign("Tied", "zero1.2"),
        in_campaign("Convolution", "dp2"),
    ],
)
def test_recomputation_draws_the_same_random_numbers(name: str, layout: str) -> None:
    curves: list[list[list[str]]] = []
    for policy in ("none", "selective", "full"):
        arguments = {"name": name, "args": TASKS[name], "layout": layout, "recompute": policy}
        curves.append(rank_values(train_task, case(layout).world_size, arguments | {"steps": 3}))
    assert curves[0] == curves[1] == curves[2]


@ranks(1)
def test_recomputation_that_is_refused(rank: RankContext) -> None:
    for name, words in (
        ("Gru", "runs the module's units again, and it has none; name some in units(), or use"),
        ("NormedUnits", "would change its buffer"),
    ):
        with pytest.raises(TaskError) as refused:
            TaskTraining(task_config(name, recompute="full"), "one", rank.rank, rank.store(name))
        assert words in str(refused.value)


@pytest.mark.parametrize(
    ("name", "more"),
    [("Tied", ()), *(in_campaign(name, ("zero2.2", "shard2")) for name in WITHOUT_RANDOM)],
)
def test_zero_agrees_with_one_process(name: str, more: tuple[str, ...], tmp_path: Any) -> None:
    """Without random numbers, and with the same parameters in use on all shards."""
    paths = {}
    for layout in ("one", "zero1.2", "dp2-shard2", *more):
        paths[layout] = tmp_path / layout
        arguments = {"name": name, "args": WITHOUT_RANDOM[name], "layout": layout}
        arguments |= {"to": str(paths[layout]), "precision": "float64"}
        rank_values(train_task, case(layout).world_size, arguments)
    whole = load_complete(f"{paths.pop('one')}-0.npz")
    for path in paths.values():
        assert_all_state(whole, sorted(tmp_path.glob(f"{path.name}-*.npz")), 1e-10)


def _validated(rank: RankContext, name: str, layout: str) -> list[float]:
    """Of 9 samples, so that a shard is left without one of the last microbatch: after two steps,
    and again."""
    made = TaskTraining(task_config(name, TASKS[name]), layout, rank.rank, rank.store())
    engine, validation = made.engine, made.task.validation(made.batches, 100)
    evaluator = Evaluator(engine.objective, engine.executor, engine.groups, validation, CPU)
    found = []
    for step in (1, 2):
        made.step(step)
        assert engine.objective.training
        evaluations = [evaluator.run(), evaluator.run()]
        assert engine.objective.training
        assert evaluations[0] == evaluations[1]
        assert evaluations[0] is not None
        assert evaluations[0].bits_per_byte is None
        assert evaluations[0].tokens == {"EncoderDecoder": 36, "Gpt2": 72}.get(name, 9)
        found.append(evaluations[0].loss)
    engine.close()
    return found


@pytest.mark.parametrize("name", _with_slow(("Normed", "Gru", "EncoderDecoder", "Gpt2"), "Gru"))
def test_a_validation_is_the_same_number_on_every_layout(name: str) -> None:
    sharded = () if name == "Normed" else ("zero1.2", "shard2")
    found = {}
    for layout in ("one", "dp3", *sharded):
        arguments = {"name": name, "layout": layout}
        curves = rank_values(_validated, case(layout).world_size, arguments)
        assert all(curve == curves[0] for curve in curves)
        found[layout] = curves[0]
    assert found["one"] == found["dp3"]
    assert found["one"][0] != found["one"][1]
    for layout in sharded:
        # the shards of a step draw other random numbers, so only a net without them agrees
        if name == "Gru":
            assert found[layout] == pytest.approx(found["one"], rel=1e-5)


def _statistics(rank: RankContext) -> dict[str, Any]:
    made = TaskTraining(task_config("Normed"), "one", rank.rank, rank.store())
    module, seen = made.engine.objective.get_submodule("model.1"), []
    module.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].detach().clone()))
    losses = [made.step(1)]
    state = {t.name: t.tensor.tolist() for t in made.engine.state()}
    found = {name: state[f"model.1.{name}"] for name in ("running_mean", "num_batches_tracked")}
    means = [x.mean((0, 2, 3)) for x in seen]
    made.engine.close()
    return found | {"expected": (0.1 * sum(means) / len(means)).tolist(), "losses": losses}


def test_running_statistics_are_the_mean_over_the_microbatches() -> None:
    """And have no part in the gradient's norm, which clips."""
    (found,) = rank_values(_statistics, 1, {})
    assert found["num_batches_tracked"] == [6.0]
    assert found["running_mean"] == pytest.approx(found["expected"], rel=1e-5, abs=1e-7)


@ranks(2)
def test_merged_buffers_are_not_cut(rank: RankContext) -> None:
    with pytest.raises(TaskError, match=r"buffer 1\.running_mean is merged, and dp_shard 2 cuts"):
        TaskTraining(task_config("Normed"), "shard2", rank.rank, rank.store())


def test_a_part_that_only_some_shards_use_does_not_stop_the_others(tmp_path: Any) -> None:
    """ZeRO 1 counts a missing gradient as zero, and so do ZeRO 2 and 3."""
    args = {"dropout": 0.0, "sometimes": True}
    found = {}
    for layout in ("zero1.2", "zero2.2", "shard2"):
        arguments = {"name": "Tied", "args": args, "layout": layout, "to": f"{tmp_path}/{layout}"}
        rank_values(train_task, 2, arguments | {"precision": "float64"})
        found[layout] = [load_pieces(tmp_path / f"{layout}-{rank}.npz") for rank in range(2)]
    for layout in ("zero2.2", "shard2"):  # test_zero_agrees compares zero1.2 with one process
        for ours, theirs in zip(found[layout], found["zero1.2"], strict=True):
            for (name, offsets, left), (_, at, right) in zip(ours, theirs, strict=True):
                assert offsets == at
                assert left == pytest.approx(right, rel=1e-9, abs=1e-12), name
