"""Policies by name, for `holdfast score --level 0`."""

from __future__ import annotations

from holdfast.simulate.engine.holdfast import holdfast
from holdfast.simulate.engine.interfaces import CostModel, Policy, PolicyMaker
from holdfast.simulate.rivals.registry import POLICIES as OTHERS
from holdfast.simulate.rivals.registry import policy_named

OURS = "holdfast"
POLICIES = (OURS, *OTHERS)


def policy_maker(name: str) -> PolicyMaker:
    """A policy that is made again for each run. Raises ConfigError."""
    return _holdfast if name == OURS else policy_named(name)


def _holdfast(cost: CostModel) -> Policy:
    return holdfast(cost)
