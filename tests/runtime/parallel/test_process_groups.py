"""Groups of a generation: a second one in the same process, with other ranks, meets no first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from holdfast.errors import PeerLostError
from holdfast.layout import Replica, Topology
from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.axes.replica_groups import ConnectSettings, join_replica_groups
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.training.engine.build import build_engine
from holdfast.wire.http.client import UnreachableError
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import CPU, digest, engine, one_step, tiny, train


def _two_generations(rank: RankContext) -> list[str]:
    """The same training in generation 1, and in generation 2 with the ranks exchanged."""
    out = []
    for generation, order in ((1, (0, 1)), (2, (1, 0))):
        topology = Topology(generation, (Replica(0, order, (1, 2, 1, 1)),), ("node",) * 2)
        groups = connect(ConnectSettings(rank.store(), CPU, seconds=120), topology, rank.rank)
        assert dist.is_initialized()
        made = build_engine(tiny(), groups, CPU)
        made.initialise(1)
        train(made, 3)
        out.append(digest(made))
        made.close()
        assert not dist.is_initialized()
    return out


def test_a_generation_with_exchanged_shards_in_the_same_process_dpshard2() -> None:
    first, second = rank_values(_two_generations, 2)
    assert first[0] == second[1]
    assert first[1] == second[0]
    assert first[0] != first[1]


def _replicas_only(rank: RankContext) -> list[float]:
    """Ranks of a topology need not be in order; torch's registry stays empty."""
    replicas = (Replica(0, (1,)), Replica(1, (0,)))
    groups = connect(
        ConnectSettings(rank.store(), CPU), Topology(1, replicas, ("node",) * 2), rank.rank
    )
    assert not dist.is_initialized()
    assert groups.control.rank == 1 - rank.rank
    record = torch.tensor([rank.rank], dtype=torch.int64)
    into = torch.empty_like(record)
    receipt = groups.control.receive(into, groups.control.others[0], tag=5)
    groups.control.send(record, groups.control.others[0], tag=5)
    receipt.wait()
    groups.close()
    return [float(into[0])]


def test_replication_leaves_torchs_registry_alone() -> None:
    assert rank_values(_replicas_only, 2) == [[1.0], [0.0]]


def _kept_sends(rank: RankContext, dp_shard: int) -> list[int]:
    """Sends that are still held after each step."""
    made = engine(
        tiny(), rank.rank, rank.store(), replicas=rank.world_size // dp_shard, dp_shard=dp_shard
    )
    groups = made.groups
    peers = [*groups._groups_between_replicas(), *groups.replica_groups.bare_groups()]
    held = []
    for step in range(1, 5):
        one_step(made, step)
        held.append(sum(len(p._pending_sends) + len(p._exchange_sends) for p in peers))
    made.close()
    return held


@pytest.mark.parametrize("dp_shard", [1, 2])
def test_sends_are_held_until_they_have_arrived_and_no_longer(dp_shard: int) -> None:
    for held in rank_values(_kept_sends, 4, {"dp_shard": dp_shard}):
        assert held[0] > 0
        assert len(set(held)) == 1


def _deserted(rank: RankContext) -> bool:
    """Rank 1 meets the others in `control`, and is gone before its replica forms."""
    if rank.rank == 1:
        PeerGroup(rank.store(), "generation1/control", 1, 2, seconds=120)
        return True
    topology = Topology(1, (Replica(0, (0, 1), (1, 2, 1, 1)),), ("node",) * 2)
    with pytest.raises(PeerLostError):
        connect(ConnectSettings(rank.store(), CPU, seconds=5), topology, 0)
    return not dist.is_initialized()


def test_a_peer_that_is_gone_before_the_replica_forms_is_a_lost_peer() -> None:
    assert rank_values(_deserted, 2) == [True, True]


def _gathering(rank: RankContext) -> str:
    """Rank 1 gives up, and lets go of nothing; rank 0 waits for it in a shard's gather."""
    topology = Topology(1, (Replica(0, (0, 1), (1, 2, 1, 1)),), ("node",) * 2)
    groups = connect(ConnectSettings(rank.store(), CPU, seconds=120), topology, rank.rank)
    said = ""
    if rank.rank == 0:
        rank.mark("gathers")
        with pytest.raises(RuntimeError) as error:
            dist.all_gather_into_tensor(torch.zeros(2), torch.ones(1), groups.axis("dp_shard"))
        said = str(error.value)
        rank.mark("woken")
    else:
        rank.wait_mark("gathers", 0)
        groups.abort()
        rank.wait_mark("woken", 0, 30.0)
    groups.abort()
    groups.close()
    return said


def test_who_gives_up_wakes_those_who_wait_in_a_shards_gather() -> None:
    said, _ = rank_values(_gathering, 2)
    assert said


class Interrupted(dist.Store):
    """A store whose waits end by an error that is not torch's, as that of a worker that is told to
    halt."""

    def set(self, key: str, value: bytes) -> None:
        pass

    def wait(self, keys: list[str], timeout: object = None) -> None:
        raise UnreachableError("interrupted")

    get = add = wait  # type: ignore[assignment]


def _comes_twice(rank: RankContext, interrupted: bool) -> list[str]:
    """Rank 0 waits for rank 1 in vain, then both meet; which ranks torch's world has then."""
    joining = ConnectSettings(Interrupted() if interrupted else rank.store(), CPU, 1.0)
    replica = Replica(0, (0, 1), (1, 2, 1, 1))
    at = Topology(1, (replica,), ("node",) * 2).coordinate(rank.rank)
    if rank.rank == 0:
        with pytest.raises(UnreachableError if interrupted else PeerLostError):
            join_replica_groups(joining, 1, replica, at, is_only_replica=True)
        rank.mark("waited")
    rank.wait_mark("waited", 0)
    joining = replace(joining, store=rank.store(), seconds=30.0)
    inside = join_replica_groups(joining, 2, replica, at, is_only_replica=True)
    met = [dist.get_rank(), dist.get_world_size()]
    rank.barrier("met")  # who leaves while the other still connects is a lost peer to it
    inside.close()
    return [str(each) for each in met]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_world_that_did_not_come_together_is_not_in_the_way_of_the_next(
    interrupted: bool,
) -> None:
    assert rank_values(_comes_twice, 2, {"interrupted": interrupted}) == [["0", "2"], ["1", "2"]]
