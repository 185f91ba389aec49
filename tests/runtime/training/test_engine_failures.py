"""What goes wrong inside a step: a killed peer, a NaN. The parameters stay as they were."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch

from holdfast.errors import NonFiniteError, PeerLostError
from holdfast.training.engine.engine import StepEngine
from tests.support.layouts import case, engine_for
from tests.support.layouts import one_step as layout_step
from tests.support.marks import in_campaign
from tests.support.nan_gradient import spoil_once
from tests.support.ranks import RankContext, rank_values, ranks
from tests.support.tiny_training import Fed, digest, engine, feed, one_step, tiny, train


@ranks(3, dies={2: "SIGKILL"})
@pytest.mark.parametrize("when", ["backward", "vote"])
def test_a_killed_peer_is_an_error_in_all_others_and_the_step_has_not_happened(
    rank: RankContext, when: str
) -> None:
    made = engine(tiny(), rank.rank, rank.store(), replicas=3, seconds=600)
    train(made, 2)
    before = digest(made)
    share = made.begin(3)
    batches = [feed(3, leaf) for leaf in share]
    rank.barrier("begun")  # else begin() may already find the peer gone
    if rank.rank == 2:
        if when == "backward":  # of the first block: the buckets of the second are on their way
            block = made.objective.get_submodule("decoder.layers.0")
            block.register_full_backward_pre_hook(lambda *_: rank.kill(2))
        made.compute(batches)
        made._gradients.finish()
        rank.kill(2)
    with pytest.raises(PeerLostError):
        _compute_and_reduce(made, batches)
    assert digest(made) == before


def _compute_and_reduce(made: StepEngine, batches: list[Fed]) -> None:
    made.compute(batches)
    made.reduce()


@ranks(4, dies={3: "SIGKILL"})
def test_a_killed_shard_is_an_error_in_its_replica_and_in_the_other(rank: RankContext) -> None:
    made = engine(tiny(), rank.rank, rank.store(), replicas=2, dp_shard=2, seconds=600)
    train(made, 1)
    before = digest(made)
    share = made.begin(2)
    batches = [feed(2, leaf, 2, made.groups.coordinate.dp_shard, 2) for leaf in share]
    rank.barrier("begun")
    if rank.rank == 3:
        rank.kill(3)
    with pytest.raises(PeerLostError):
        _compute_and_reduce(made, batches)
    assert digest(made) == before


def _spoil(made: StepEngine, parameter: str) -> None:
    index = [row.name for row in made.parameters.table].index(parameter)
    made.parameters.master_tensors[index].view(-1)[0] = math.nan


def _poisoned(rank: RankContext, dp_shard: int, parameter: str, at_rank: int) -> list[Any]:
    """A NaN in the weights of one rank: what every rank says, and whether anything changed."""
    replicas = rank.world_size // dp_shard
    made = engine(tiny(), rank.rank, rank.store(), replicas=replicas, dp_shard=dp_shard)
    train(made, 2)
    if rank.rank == at_rank:
        _spoil(made, parameter)
    before = digest(made)
    try:
        one_step(made, 3)
    except NonFiniteError as error:
        suspects = [list(error.suspects), error.again]
        return [error.step, error.rank, error.parameter, digest(made) == before, *suspects]
    return []


@pytest.mark.parametrize("parameter", ["layers.1.ffn.up.weight", "layers.0.attention_norm.weight"])
def test_a_nan_is_named_by_rank_and_parameter_on_every_rank(parameter: str) -> None:
    said = rank_values(_poisoned, 3, {"dp_shard": 1, "parameter": parameter, "at_rank": 1})
    assert said == [[3, 1, parameter, True, [4, 5, 6, 7], True]] * 3, "and all that it computed"


def test_a_nan_in_a_shard_is_found_dpshard2() -> None:
    name = "layers.1.ffn.up.weight"
    said = rank_values(_poisoned, 4, {"dp_shard": 2, "parameter": name, "at_rank": 3})
    # Both ranks of replica 1 gather the bad weight: the lower one is named.
    assert said == [[3, 2, name, True, [6, 7, 8, 9, 10, 11], True]] * 4


def _poisoned_in(rank: RankContext, name: str, parameter: str, at_rank: int) -> list[Any]:
    made = engine_for(rank, name)
    if rank.rank == at_rank:
        _spoil(made, parameter)
    with pytest.raises(NonFiniteError) as caught:
        layout_step(made, 1)
    return [caught.value.rank, caught.value.parameter]


@pytest.mark.parametrize(
    ("name", "at_rank", "parameter"),
    [
        ("tp2", 1, "layers.0.attention.q.weight"),
        in_campaign("tp2", 1, "layers.3.ffn.down.weight"),
        in_campaign("plain.tp2", 1, "layers.0.ffn.gate.weight"),
        ("pp2-tp2", 3, "layers.3.attention.v.weight"),
        ("pp2", 0, "layers.1.ffn.up.weight"),
    ],
)
def test_a_nan_is_named_where_it_began_and_not_where_its_sum_arrived(
    name: str, at_rank: int, parameter: str
) -> None:
    """Of the ranks of a tensor-parallel group, all see a NaN, but only one had it first."""
    arguments = {"name": name, "parameter": parameter, "at_rank": at_rank}
    said = rank_values(_poisoned_in, case(name).world_size, arguments)
    assert said == [[at_rank, parameter]] * case(name).world_size


def _errs_once(rank: RankContext, name: str, at_rank: int) -> list[Any]:
    """One rank gives the sum a NaN that its next computation does not give again."""
    made = engine_for(rank, name)
    clean = layout_step(made, 1)
    before = digest(made)
    if rank.rank == at_rank:
        spoil_once(made._gradients.reducers[0])  # type: ignore[attr-defined]
    with pytest.raises(NonFiniteError) as caught:
        layout_step(made, 2)
    error, unharmed = caught.value, digest(made) == before
    avoid = {leaf: [made.groups.topology.replica_of(error.rank).index] for leaf in error.suspects}
    made.plan.deal_elsewhere(2, avoid)
    dealt = made.plan.shares(2)
    again = layout_step(made, 2)
    moved = [list(dealt[replica]) for replica in range(len(dealt))]
    return [
        error.rank,
        error.parameter,
        list(error.suspects),
        error.again,
        unharmed,
        moved,
        again.norm,
        clean.is_finite,
    ]


@pytest.mark.parametrize(
    ("name", "at_rank", "seen"),
    [
        ("dp2", 1, 1),
        ("dp2-tp2", 3, 3),
        in_campaign("dp2-shard2", 2, 2),
        in_campaign("dp2-pp2", 1, 1),
    ],
)
def test_what_one_rank_gave_once_is_its_replica_s_and_is_computed_by_another_one(
    name: str, at_rank: int, seen: int
) -> None:
    said = rank_values(_errs_once, case(name).world_size, {"name": name, "at_rank": at_rank})
    assert said == [said[0]] * len(said)
    rank, parameter, suspects, again, unharmed, moved, norm, _ = said[0]
    assert (rank, parameter, again, unharmed) == (seen, "a gradient", False, True)
    replica = at_rank // (case(name).world_size // 2)
    assert moved[1 - replica] == suspects, "the replicas have changed their shares"
    assert math.isfinite(norm)


def test_a_nan_born_in_the_backward_is_named_by_its_first_gradient() -> None:
    made = engine(tiny(), 0, torch.distributed.HashStore())
    name = "layers.0.ffn.down.weight"
    module = made.objective.get_submodule("decoder.layers.0.ffn.down")
    module.register_full_backward_pre_hook(lambda _, grads: (grads[0] * math.inf,))
    before = digest(made)
    with pytest.raises(NonFiniteError) as caught:
        one_step(made, 1)
    assert (caught.value.rank, caught.value.parameter) == (0, name)
    assert digest(made) == before
    assert math.isnan(made._gradients.squared_norm())


@pytest.mark.slow
def test_a_nan_inside_compiled_blocks_is_named_all_the_same() -> None:
    made = engine(tiny(), 0, torch.distributed.HashStore())
    for index in range(2):
        block = made.objective.get_submodule(f"decoder.layers.{index}")
        block.compile(backend="aot_eager")
    one_step(made, 1)
    name = "layers.1.ffn.up.weight"
    _spoil(made, name)
    with pytest.raises(NonFiniteError) as caught:
        one_step(made, 2)
    assert caught.value.parameter == name


def test_after_a_non_finite_step_a_clean_one_gives_the_same_bits_as_ever() -> None:
    made = engine(tiny(), 0, torch.distributed.HashStore())
    clean = engine(tiny(), 0, torch.distributed.HashStore())
    hook = made.objective.register_forward_hook(lambda *a: a[-1] * math.nan)
    with pytest.raises(NonFiniteError):
        one_step(made, 1)
    hook.remove()
    train(made, 2)
    train(clean, 2)
    assert digest(made) == digest(clean)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("broken", [1, 2])
def test_a_step_given_up_between_leaves_leaves_nothing_behind(where: str, broken: int) -> None:
    """broken: the microbatch that fails. 0 and 1 are siblings, and so are 2 and 3."""
    made = engine(tiny(train__precision="fp32"), 0, torch.distributed.HashStore())
    clean = engine(tiny(train__precision="fp32"), 0, torch.distributed.HashStore())
    passes = 0

    def fail(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes > broken:
            raise ValueError("given up")

    block = made.objective.get_submodule("decoder.layers.0")
    if where == "forward":
        hook = block.register_forward_pre_hook(fail)
    else:
        hook = block.register_full_backward_pre_hook(fail)
    with pytest.raises(ValueError, match="given up"):
        one_step(made, 1)
    assert passes == broken + 1
    hook.remove()
    train(made, 2)
    train(clean, 2)
    assert digest(made) == digest(clean)


@ranks(2)
@pytest.mark.parametrize("when", [in_campaign("forward"), "backward"])
def test_an_engine_of_an_interrupted_pass_can_be_collected(rank: RankContext, when: str) -> None:
    """Each recovery left the state of the generation before in memory, while it could not."""
    made = engine(tiny(), rank.rank, rank.store(), replicas=1, dp_shard=2)
    train(made, 1)
    share = made.begin(2)
    batches = [feed(2, leaf, 2, made.groups.coordinate.dp_shard, 2) for leaf in share]
    block = made.objective.get_submodule(f"decoder.layers.{int(when == 'forward')}")
    if when == "forward":
        block.register_forward_pre_hook(lambda *_: _connection_is_closed())
    else:
        block.register_full_backward_pre_hook(lambda *_: _connection_is_closed())
    with pytest.raises(PeerLostError):
        made.compute(batches)
    made.groups.abort()
    made.close()
    left = weakref.ref(made.objective)
    del made, block
    gc.collect()
    assert left() is None


def _connection_is_closed() -> None:
    raise RuntimeError("Connection closed by peer")


def _broken_choices(rank: RankContext, name: str) -> str:
    made = engine_for(rank, name)
    names = [row.name for row in made.parameters.table]
    victim = next((i for i, one in enumerate(names) if "choice_bias" in one), None)
    feeder: Any = made._gradients
    take = feeder._take

    def broken(index: int, gradient: Any) -> None:
        if index == victim and rank.rank == 0:
            gradient.view(-1)[0] = math.nan
        take(index, gradient)

    feeder._take = broken
    with pytest.raises(NonFiniteError) as caught:
        layout_step(made, 1)
    return f"{caught.value.parameter} of rank {caught.value.rank}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sigmoid.dp2", "sigmoid.pp2"])
def test_what_the_norm_does_not_count_is_refused_too(name: str) -> None:
    """The gradient of a bias of the choice of experts is a count, and no part of the norm."""
    said = rank_values(_broken_choices, case(name).world_size, {"name": name})
    assert said == ["a gradient of rank 0"] * case(name).world_size
