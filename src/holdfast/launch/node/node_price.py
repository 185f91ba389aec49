"""What an hour of this node costs, by the cluster file of its run.

checkpoint.machine.pool   its pool, if the file has several (HOLDFAST_PLACE gives it, too)
HOLDFAST_RESOURCE_ID      its id in the bill of its owner; left out: its name
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from holdfast.config.loading.load import LoadedConfig
from holdfast.config.run import RunConfig
from holdfast.errors import ConfigError, OverBudgetError
from holdfast.events import BudgetReached
from holdfast.plan.hardware.cluster_file import HERE, read_cluster
from holdfast.policy.budget import amount, budget_use, effective_limits
from holdfast.policy.spending import NodePrice, Spent, in_order, meter_of
from holdfast.wire.journal import read_journal
from holdfast.wire.raised_budget import read_raises
from holdfast.wire.store.run_store import RunStore

RESOURCE_VARIABLE = "HOLDFAST_RESOURCE_ID"


def node_price(config: RunConfig, environ: Mapping[str, str]) -> NodePrice:
    """Return the price of this node. Raises ConfigError or DataError for a wrong cluster file."""
    resource = environ.get(RESOURCE_VARIABLE, "")
    text = config.plan.cluster
    pools = read_cluster(text).pools if text not in ("", HERE) else ()
    named = config.checkpoint.machine.pool
    fitting = [pool for pool in pools if pool.name == named] if named else list(pools)
    if len(fitting) != 1:
        return NodePrice(pool=named, resource=resource)
    pool = fitting[0]
    market = "spot" if pool.is_spot else "on-demand"
    return NodePrice(pool.name, market, pool.usd_per_hour, resource)


def refuse_unknown_price(loaded: LoadedConfig, price: NodePrice) -> None:
    """Raises ConfigError for a budget in dollars, if this node's price is not known."""
    if loaded.config.budget.max_cost is None or price.usd_per_hour is not None:
        return
    pool = f"pool {price.pool}" if price.pool else "its pool (checkpoint.machine.pool)"
    raise ConfigError(
        "a budget in dollars needs the price of each node, and that of this one is not known",
        where=loaded.where("budget.max_cost"),
        remedy=f"name a cluster file with usd_per_hour of {pool} in plan.cluster, or use "
        "budget.max_node_hours",
    )


def refuse_spent_budget(loaded: LoadedConfig, store: RunStore) -> None:
    """Raises OverBudgetError if the sessions before have used up the budget of the run."""
    budget = loaded.config.budget
    if not budget.is_set or budget.on_exceed == "warn":
        return
    limits = effective_limits(budget, read_raises(store))
    records = read_journal(store)
    meter = meter_of(records)
    use = budget_use(meter.spent(), Spent(), 0.0, limits)
    events = (record.event for record in in_order(records))
    stops = [e for e in events if isinstance(e, BudgetReached) and e.action == "stopped"]
    # It stopped with a little left, too little for a step and a save, and that is still so.
    is_stopped = bool(stops) and limits.get(stops[-1].limit, math.inf) <= stops[-1].most
    if use is None or (use.share < 1 and not is_stopped):
        return
    raise OverBudgetError(
        f"the run has used {amount(use.limit, use.used)} of {amount(use.limit, use.most)}",
        where=loaded.where(f"budget.{use.limit}"),
        remedy=f"give it more: budget.{use.limit}={math.ceil(use.used * 1.5)}",
    )
