"""Policies by name, for `holdfast score --level 0`."""

from __future__ import annotations

from holdfast_lab.engine.holdfast import holdfast
from holdfast_lab.engine.interfaces import CostModel, Policy, PolicyMaker
from holdfast_lab.rivals.registry import POLICIES as OTHERS
from holdfast_lab.rivals.registry import policy_named

OURS = "holdfast"
POLICIES = (OURS, *OTHERS)


def policy_maker(name: str) -> PolicyMaker:
    """A policy that is made again for each run. Raises ConfigError."""
    return _holdfast if name == OURS else policy_named(name)


def _holdfast(cost: CostModel) -> Policy:
    return holdfast(cost)
