"""Policies by name: ours, and those of other trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.errors import ConfigError, unknown_name
from holdfast_lab.engine.capped import CLOCKS, capped
from holdfast_lab.engine.holdfast import holdfast
from holdfast_lab.engine.interfaces import CostModel, Policy, PolicyMaker
from holdfast_lab.rivals.acute import HierarchyPolicy
from holdfast_lab.rivals.bamboo import BambooPolicy
from holdfast_lab.rivals.grid_cost import as_grid
from holdfast_lab.rivals.parcae import MinutelyPolicy, forecast_chooser
from holdfast_lab.rivals.restart import RestartPolicy
from holdfast_lab.rivals.torchft import TorchftPolicy
from holdfast_lab.rivals.varuna import VarunaPolicy


def _bamboo(cost: CostModel) -> Policy:
    """The published depth if the cost model has it, and that of the fastest layout if not."""
    grid = as_grid(cost)
    policy = BambooPolicy(grid)
    if grid.shaped(1, policy.stages) is None and (best := cost.point(cost.wanted)) is not None:
        policy.stages = best.nodes_per_replica
    return policy


def _parcae(cost: CostModel) -> Policy:
    grid = as_grid(cost)
    return MinutelyPolicy(grid, forecast_chooser(grid))


POLICIES: Mapping[str, Callable[[CostModel], Policy]] = {
    "holdfast": holdfast,
    "restart": RestartPolicy,
    "torchft": lambda cost: TorchftPolicy(as_grid(cost)),
    "bamboo": _bamboo,
    "varuna": VarunaPolicy,
    "parcae": _parcae,
    "acute": HierarchyPolicy,
}
"""What each name stands for: docs/studies/rivals.md."""


def policy_named(name: str) -> PolicyMaker:
    """The policy of a trainer. Raises ConfigError for a name that is not known."""
    if name in CLOCKS:
        return capped(name, holdfast)
    if name not in POLICIES:
        raise unknown_name(ConfigError, "policy", name, [*POLICIES, *CLOCKS], "--policy")
    return POLICIES[name]
