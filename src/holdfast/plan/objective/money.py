"""Dollars of the nodes that a layout occupies. A price that is not known is refused, never 0."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors import ConfigError
from holdfast.plan.cost.choice import Choice
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.objective.occupancy import nodes_used


def pools_without_price(cluster: Cluster) -> tuple[str, ...]:
    return tuple(pool.name for pool in cluster.pools if pool.usd_per_hour <= 0)


def refuse_without(key: str, cluster: Cluster, objective: str) -> None:
    """Raises ConfigError if a pool does not give a key: its price, or the CO2 of its power."""
    if pools := [pool.name for pool in cluster.pools if getattr(pool, key) <= 0]:
        raise ConfigError(
            f"the objective {objective} needs {key}, which the cluster does not have for "
            f"{', '.join(pools)}",
            where=f"pools.{pools[0]}.{key}",
            remedy=f"give each pool its {key}, or use plan.objective=time",
        )


def usd_per_hour(
    cluster: Cluster, choice: Choice, present: Mapping[str, float] | None = None
) -> float:
    """Of the nodes that have a rank. present: share of its time in which a node of the pool is
    there; a node that is lost is not paid for."""
    return sum(
        number * cluster.pool(name).usd_per_hour * (present or {}).get(name, 1.0)
        for name, number in nodes_used(cluster, choice).items()
    )
