"""Training over a backend with NCCL's habits: the bits of gloo, in each layout.

The stand-in (`tests/support/fake_nccl.py`) takes the place of the device's backend. All code that a
device would run is run: groups made after a vote, sums in a lane, pipes between stages. Each rank
has as many groups as `layout show` says.
"""

from __future__ import annotations

import gc

import pytest

from holdfast.plan.memory.communicators import communicators_by_rank
from tests.runtime.training.test_parity import LAYOUTS
from tests.support import fake_nccl
from tests.support.layouts import case, config_of, curve_of, engine_for
from tests.support.ranks import RankContext, rank_values

STEPS = 2
QUICK = ["bf16.pp2-tp2"]
SCHEDULES = [
    *("interleaved.pp2", "eight.interleaved.pp4", "zbh1.pp2-tp2", "zbv.pp2-dp2", "eight.zbv.pp4"),
    *("dualpipev.pp2", "eight.dualpipev.pp4"),
]
MORE = ["dp3", "tp2+one", "bf16.pp2-dp2", "small.dp3", "zero1.2-dp2", "fp32.tp2+one", "dp6"]
CONTEXT = ["cp2-tp2", "ring.pp2-cp2", "heads.ulysses.cp2", "long.ring.cp4", "long.heads.hybrid.cp4"]
IN_RANK_ORDER = ["plain.tp4", "long.ring.cp4", "long.heads.hybrid.cp4"]
CASES = [
    *QUICK,
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in dict.fromkeys([*LAYOUTS, *MORE, *CONTEXT, *SCHEDULES])
        if name not in QUICK
    ),
]


def _both(rank: RankContext, layout: str) -> None:
    seen = []
    for backend in ("gloo", fake_nccl.NAME):
        if backend == fake_nccl.NAME:
            fake_nccl.install()
        config = config_of(case(layout).changes)
        made = engine_for(rank, layout, config, backend)
        seen.append(curve_of(made, STEPS, config.data))
        if backend == fake_nccl.NAME:
            on_device = config.model_copy(update={"device": "cuda"})
            assert _opened() == communicators_by_rank(on_device, made.groups.topology)[rank.rank]
        made.close()
    if layout in IN_RANK_ORDER:  # gloo adds these up in a ring
        for key in ("losses", "norms"):
            assert seen[0][key] == pytest.approx(seen[1][key], rel=1e-12)
    else:
        assert seen[0] == seen[1]


def _opened() -> int:
    """Groups of this process that have made their communicator."""
    groups = [each for each in gc.get_objects() if isinstance(each, fake_nccl.FakeNccl)]
    return sum(group._peers is not None for group in groups)


@pytest.mark.parametrize("layout", CASES)
def test_a_device_without_tags_has_the_bits_of_gloo(layout: str) -> None:
    rank_values(_both, case(layout).world_size, {"layout": layout})
