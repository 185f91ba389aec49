"""Collectives over tensor ranks, and components that fewer ranks cut (`layout.tp_by`)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from holdfast.parallel.comm.collectives import Collectives
from tests.runtime.parallel.test_tensor_parallel import Degrees, check_step, config, samples, spread
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values, ranks


def check_components(rank: RankContext, cases: list[tuple[str, Degrees, int]]) -> None:
    """Of each case a shape, degrees, and samples: fewer than there are sets of ranks, too."""
    group = rank.init_torch_world()
    for index, (shape, tp_by, batch) in enumerate(cases):
        model = config(shape)
        given = samples(model, documents=index % 2 == 1, batch=batch)
        for sequence_parallel in (True, False):
            objective = spread(model, group, sequence_parallel, tp_by=tp_by)
            heads = model.heads // tp_by.get("attention", group.size())
            query = objective.decoder.layers[0].attention.q.weight
            assert query.shape[0] == heads * model.head_size
            message = f"{shape} {tp_by} {batch} {sequence_parallel}"
            check_step(objective, given, group, sequence_parallel, message, tp_by)
    dist.barrier()


TWO: list[tuple[str, Degrees, int]] = [
    ("odd_heads", {"attention": 1, "ffn": 1}, 4),
    ("biases", {"attention": 1}, 3),
    ("gemma", {"attention": 1, "ffn": 1}, 1),
]
FOUR: list[tuple[str, Degrees, int]] = [
    ("six_heads", {"attention": 2}, 4),
    ("six_heads", {"attention": 2, "ffn": 1}, 3),
    ("biases", {"attention": 2, "ffn": 2}, 1),
    ("biases", {"attention": 1}, 5),
    ("uneven_ffn", {"ffn": 2}, 1),
    ("qk_norm_all", {"attention": 1}, 4),
    ("qk_norm", {"attention": 2, "ffn": 1}, 2),
]


@pytest.mark.parametrize("tp", [2, in_campaign(4)])
def test_components_of_a_lower_degree(tp: int) -> None:
    rank_values(check_components, tp, {"cases": TWO if tp == 2 else FOUR}, deadline=240)


@ranks(4)
def test_collectives_add_in_rank_order_in_every_dtype(rank: RankContext) -> None:
    group = rank.init_torch_world()
    collectives = Collectives(group)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        everybody = [
            torch.randn(8, 3, generator=torch.Generator().manual_seed(r)).to(dtype)
            for r in range(4)
        ]
        mine = everybody[rank.rank]
        assert torch.equal(collectives.all_gather(mine), torch.cat(everybody))
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        total = everybody[0].to(wide)
        for other in everybody[1:]:
            total = total + other
        part = total.to(dtype).chunk(4)[rank.rank]
        assert torch.equal(collectives.reduce_scatter(mine), part)
        # What comes out of autograd may lie anyhow in memory.
        assert torch.equal(collectives.reduce_scatter(mine.T.contiguous().T), part)
        near = 0.05 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(
            collectives.all_reduce(mine), total.to(dtype), rtol=near, atol=near
        )
    assert torch.equal(mine, everybody[rank.rank])
    dist.barrier()
