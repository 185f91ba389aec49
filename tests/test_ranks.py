from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankContext, ranks


@ranks(2)
def test_ranks_meet_and_reduce(rank: RankContext) -> None:
    rank.init_torch_world()
    x = torch.full((3,), float(rank.rank + 1))
    dist.all_reduce(x)
    assert x.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("n", [1, 3])
@ranks("n")
def test_parametrized(rank: RankContext, n: int) -> None:
    assert rank.world_size == n
