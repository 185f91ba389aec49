"""What DTensor's caches do to a process that lives through several generations, and the cure."""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.parallel.torch_compat import forget_meshes
from tests.support.mesh_caches import count_mesh_cache_entries
from tests.support.ranks import RankContext, rank_values, ranks


def _doubled(rank: RankContext, world: str, me: int) -> list[float]:
    """My shard of 2a in a world where I am rank `me`; every rank holds the whole of a."""
    dist.init_process_group("gloo", store=rank.store(world), rank=me, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    a = DTensor.from_local(torch.arange(4.0), mesh, [Replicate()], run_check=False)
    shard = (a * 2).redistribute(placements=[Shard(0)])
    rank.barrier(f"{world} is used")  # who leaves early breaks a connection that still forms
    dist.destroy_process_group()
    return [float(x) for x in shard.to_local()]


def _swapped(rank: RankContext, forget: bool) -> list[list[float]]:
    before = _doubled(rank, "before", rank.rank)
    if forget:
        forget_meshes()
    return [before, _doubled(rank, "after", 1 - rank.rank)]


def test_a_process_that_changes_its_rank_gets_its_own_shard() -> None:
    """Two ranks swap. The meshes of both worlds compare equal, so torch's caches take the second
    for the first, and give each rank the shard of the rank it was: wrong, and without an error."""
    first, second = [0.0, 2.0], [4.0, 6.0]
    assert rank_values(_swapped, 2, {"forget": True}) == [[first, second], [second, first]]
    assert rank_values(_swapped, 2, {"forget": False}) == [[first, first], [second, second]]


def _trained(rank: RankContext, world: str, axis: str) -> None:
    """Two steps by torch's own means, over DTensors."""
    dist.init_process_group("gloo", store=rank.store(world), rank=rank.rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    rank.barrier(f"{world} is used")  # who leaves early breaks a connection that still forms
    dist.destroy_process_group()


def _threads() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/task"))


@ranks(2)
def test_the_threads_of_old_groups_belong_to_cached_meshes(rank: RankContext) -> None:
    """torch keeps three threads of each gloo group that a mesh has been used on: its caches own
    the mesh, the mesh its groups. With axes named by generation none ever replaces another."""
    alone = _threads()
    for generation in range(4):
        _trained(rank, f"generation{generation}", f"dp_shard_generation{generation}")
    assert _threads() >= alone + 3 * 4
    assert count_mesh_cache_entries() > 0
    forget_meshes()
    assert count_mesh_cache_entries() == 0
    assert _threads() == alone
