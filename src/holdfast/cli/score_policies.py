"""Policies by name, for `holdfast score --level 0`."""

from __future__ import annotations

from holdfast.errors import ConfigError
from holdfast.simulate.engine.holdfast import holdfast
from holdfast.simulate.engine.interfaces import CostModel, Policy, PolicyMaker

POLICIES = ("holdfast",)


def policy_maker(name: str) -> PolicyMaker:
    """A policy that is made again for each run. Raises ConfigError."""
    if name == "holdfast":
        return _holdfast
    raise ConfigError(
        f"there is no policy {name!r}",
        where="command line, --policy",
        remedy=f"use one of {', '.join(POLICIES)}",
    )


def _holdfast(cost: CostModel) -> Policy:
    return holdfast(cost)
