"""What goes wrong inside a step: a killed peer, a NaN. The parameters stay as they were."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from holdfast.errors import NonFiniteError, PeerLostError
from holdfast.train.engine import StepEngine
from tests.ranks import RankContext, rank_values, ranks
from tests.train.worlds import Fed, digest, engine, feed, one_step, tiny, train


@ranks(3, dies={2: "SIGKILL"}, deadline=40)
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
        made._reducer.finish()
        rank.kill(2)
    with pytest.raises(PeerLostError):
        _compute_and_reduce(made, batches)
    assert digest(made) == before


def _compute_and_reduce(made: StepEngine, batches: list[Fed]) -> None:
    made.compute(batches)
    made.reduce()


@ranks(4, dies={3: "SIGKILL"}, deadline=60)
def test_a_killed_shard_is_an_error_in_its_replica_and_in_the_other(rank: RankContext) -> None:
    made = engine(tiny(), rank.rank, rank.store(), replicas=2, dp_shard=2, seconds=600)
    train(made, 1)
    before = digest(made)
    share = made.begin(2)
    batches = [feed(2, leaf, 2, made.groups.coordinate.mesh_rank, 2) for leaf in share]
    rank.barrier("begun")
    if rank.rank == 3:
        rank.kill(3)
    with pytest.raises(PeerLostError):
        _compute_and_reduce(made, batches)
    assert digest(made) == before


def _poisoned(rank: RankContext, dp_shard: int, parameter: str, at_rank: int) -> list[Any]:
    """A NaN in the weights of one rank: what every rank says, and whether anything changed."""
    replicas = rank.world_size // dp_shard
    made = engine(tiny(), rank.rank, rank.store(), replicas=replicas, dp_shard=dp_shard)
    train(made, 2)
    if rank.rank == at_rank:
        index = [row.name for row in made.parameters.table].index(parameter)
        made.parameters.held[index].view(-1)[0] = math.nan
    before = digest(made)
    try:
        one_step(made, 3)
    except NonFiniteError as error:
        return [error.step, error.rank, error.parameter, digest(made) == before]
    return []


@pytest.mark.parametrize("parameter", ["layers.1.ffn.up.weight", "layers.0.attention_norm.weight"])
def test_a_nan_is_named_by_rank_and_parameter_on_every_rank(parameter: str) -> None:
    said = rank_values(_poisoned, 3, {"dp_shard": 1, "parameter": parameter, "at_rank": 1})
    assert said == [[3, 1, parameter, True]] * 3


def test_a_nan_in_a_shard_is_found_dpshard2() -> None:
    name = "layers.1.ffn.up.weight"
    said = rank_values(_poisoned, 4, {"dp_shard": 2, "parameter": name, "at_rank": 3})
    # Both ranks of replica 1 gather the bad weight: the lower one is named.
    assert said == [[3, 2, name, True]] * 4


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
    assert math.isnan(float(made._reducer.gradient.sum()))


def test_a_nan_inside_compiled_blocks_is_named_all_the_same() -> None:
    made = engine(tiny(), 0, torch.distributed.HashStore())
    for index in range(2):
        block = made.objective.get_submodule(f"decoder.layers.{index}")
        block.compile(backend="aot_eager")
    one_step(made, 1)
    name = "layers.1.ffn.up.weight"
    index = [row.name for row in made.parameters.table].index(name)
    made.parameters.held[index].view(-1)[0] = math.nan
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
