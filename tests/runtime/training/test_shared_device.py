"""Several workers on a device: all exchanges go over gloo through the host's memory.

On a CPU every tensor is copied out and back as on a device, so a copy that is missing, or too late,
changes the bits.
"""

from __future__ import annotations

import pytest

from tests.support.layouts import case, config_of, curve_of, engine_for
from tests.support.ranks import RankContext, rank_values

STEPS = 3
QUICK = ["pp2-shard2-tp2"]
MORE = ["dp2", "shard2", "tp2", "pp2", "zero1.2-dp2", "once.zero2.2-dp2", "gathered.dp3"]
EXPERTS = ["experts.ep2.shard2", "copies.experts.ep2.shard4"]
CONTEXT = ["cp2-tp2", "ring.pp2-cp2", "heads.ulysses.cp2", "long.heads.hybrid.cp4"]
CASES = [
    *QUICK,
    *(pytest.param(name, marks=pytest.mark.slow) for name in [*MORE, *EXPERTS, *CONTEXT]),
]


def _both(rank: RankContext, layout: str) -> None:
    seen = []
    for name in (layout, f"shared.{layout}"):
        config = config_of(case(name).changes)
        made = engine_for(rank, name, config, name)
        seen.append(curve_of(made, STEPS, config.data))
        made.close()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("layout", CASES)
def test_workers_that_share_a_device_have_the_bits_of_gloo(layout: str) -> None:
    rank_values(_both, case(layout).world_size, {"layout": layout})
