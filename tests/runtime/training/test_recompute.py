"""Blocks that are run again in the backward pass: the curve keeps its bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from holdfast.training.memory.recompute import OPERATIONS, drops_out
from tests.support.layouts import RECOMPUTE, case, config_of, curve_of, engine_for
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values

STEPS = 3


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_a_kernel_that_drops_out_is_seen(name: str) -> None:
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default
    assert op in OPERATIONS["attention"]
    names = [argument.name for argument in op._schema.arguments]
    given = [0.1 if each == "dropout_p" else None for each in names]
    assert drops_out(op, given, {})
    assert drops_out(op, [], {"dropout_p": 0.1})
    assert not drops_out(op, [0.0] * len(names), {})
    assert not drops_out(op, [], {})


def _curves(rank: RankContext, name: str, policies: Sequence[str]) -> dict[str, Any]:
    """Losses, norms and the final state under each policy, in full precision."""
    found = {}
    for policy in policies:
        changes = {**case(name).changes, **RECOMPUTE[policy], "train__batch_size": 16}
        made = engine_for(rank, name, config_of(changes), policy)
        found[policy] = curve_of(made, STEPS)
        made.close()
    return found


POLICIES = ["none", "selective", "full"]
KEPT = ["none", "attention", "activation", "most"]
CUT = ["none", "cut", "cut-most"]
STAGED = ["none", "staged", "unstaged"]
LAYOUTS = [
    ("tp2", POLICIES),
    ("shard2", ["none", "full", "most"]),
    ("plain.pp2-tp2", ["none", "cut"]),
]
MORE = [
    *("pp2", "zero1.2", "one", "plain.tp2", "gpipe.pp2", "zero2.2", "dp2", "gathered.dp2"),
    *("pp2-tp2", "pp2-shard2", "shard2-tp2", "tp2+one", "gemma.pp2-tp2", "gemma.zero2.2"),
    *("biased.shard2", "qknorm.tp2", "fp32.tp2", "bf16.pp2", "bf16.shard2", "bf16.zero1.2"),
]
MORE_KEPT = [
    *("one", "cp2", "ring.cp2", "ulysses.cp2", "tp2", "pp2", "zero1.2", "bf16.shard2"),
    *("gemma.zero2.2", "biased.tp2"),
]
MORE_CUT = ["plain.tp2", "plain.tp4", "plain.bf16.tp2", "plain.pp2-tp2", "plain.shard2-tp2"]
COMPILED = ["one", "tp2", "pp2", "shard2", "zero1.2"]
MORE_STAGED = ["pp2", "gpipe.pp2", "bf16.pp2", "pp2-tp2", "pp2-shard2"]


@pytest.mark.parametrize(
    ("name", "policies"),
    [
        *LAYOUTS,
        *(in_campaign(name, POLICIES) for name in MORE),
        *(in_campaign(name, KEPT) for name in MORE_KEPT),
        *(in_campaign(name, CUT) for name in MORE_CUT),
        *(in_campaign(name, STAGED) for name in MORE_STAGED),
        *(in_campaign(f"compiled.fp32.{name}", ["none", "full"]) for name in COMPILED),
        in_campaign("compiled.fp32.plain.tp2", ["none", "cut"]),
    ],
)
def test_no_bit_changes(name: str, policies: list[str]) -> None:
    world, arguments = case(name).world_size, {"name": f"shallow.{name}", "policies": policies}
    for value in rank_values(_curves, world, arguments, deadline=600):
        for policy in policies:
            assert value[policy] == value["none"], policy
