"""Gradients that travel by collectives: the bits of those that travel by messages, in each layout.

Both engines of a test are of the same ranks and feeds. The losses, the norms and
the last state are compared bit by bit.
"""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.torch_compat import Work
from tests.runtime.training.test_parity import LAYOUTS
from tests.support.layouts import case, config_of, curve_of, engine_for
from tests.support.ranks import RankContext, rank_values

STEPS = 2
MORE = ["dp3", "small.dp3", "dp6", "small.dp4", "bf16.dp3", "bf16.pp2-tp2", "fp32.tp2+one"]
QUICK = ["dp3", "small.dp3", "tp2+one", "zero1.2-dp2", "bf16.pp2-dp2"]
CASES = [
    *QUICK,
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in [*LAYOUTS, *MORE]
        if name not in QUICK
    ),
]


def _both(rank: RankContext, layout: str) -> None:
    seen, collectives = [], []
    all_to_all = PeerGroup.all_to_all

    def counted(peers: PeerGroup, *arguments: Any) -> Work:
        collectives.append(exchange)
        return all_to_all(peers, *arguments)

    PeerGroup.all_to_all = counted  # type: ignore[method-assign]  # in this rank's process
    for exchange in ("direct", "gathered"):
        config = config_of({**case(layout).changes, "layout__exchange": exchange})
        made = engine_for(rank, layout, config, exchange)
        shared = any(len(each.team.members) > 1 for each in made._gradients.reducers)
        seen.append(curve_of(made, STEPS))
        made.close()
    assert seen[0] == seen[1]
    assert set(collectives) == ({"gathered"} if shared else set()), "the key had no effect"


@pytest.mark.parametrize("layout", CASES)
def test_collectives_have_the_bits_of_messages(layout: str) -> None:
    rank_values(_both, case(layout).world_size, {"layout": layout})
