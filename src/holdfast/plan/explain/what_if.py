"""A cluster after a loss, as `--what-if` names it."""

from __future__ import annotations

from dataclasses import replace

from holdfast.errors import ConfigError
from holdfast.plan.hardware.cluster import Cluster

FORMS = "lost=3 (nodes), lost=3,2 (of each pool), lost=node:POOL, lost=rack:POOL or lost=zone:NAME"


def after_loss(cluster: Cluster, text: str) -> tuple[Cluster, str]:
    """The rest of a cluster, and the loss in words. Raises ConfigError for what names none, and for
    more than there is."""
    word, equals, what = text.partition("=")
    if word.strip() != "lost" or not equals or not what.strip():
        raise _unreadable(text)
    lost = _lost_nodes(cluster, what.strip(), text)
    for pool in cluster.pools:
        if lost.get(pool.name, 0) > pool.nodes:
            raise ConfigError(
                f"the pool {pool.name} has {pool.nodes} nodes, fewer than are lost",
                where=f"--what-if {text}",
                remedy=f"use lost={pool.nodes} or fewer",
            )
    left = tuple(
        replace(pool, nodes=pool.nodes - lost.get(pool.name, 0))
        for pool in cluster.pools
        if pool.nodes > lost.get(pool.name, 0)
    )
    pairs = ((n, f"node{'s' if n > 1 else ''} of {name}") for name, n in lost.items() if n)
    return replace(cluster, pools=left), " and ".join(f"{n} {what}" for n, what in pairs)


def _lost_nodes(cluster: Cluster, what: str, text: str) -> dict[str, int]:
    """Nodes that are lost, by pool."""
    kind, colon, name = what.partition(":")
    if colon and kind == "zone":
        found = {pool.name: pool.nodes for pool in cluster.pools if pool.zone == name}
        if not found:
            zones = sorted({pool.zone for pool in cluster.pools if pool.zone})
            raise ConfigError(
                f"no pool is in the zone {name!r}",
                where=f"--what-if {text}",
                remedy=f"use lost=zone:{zones[0]}" if zones else "use lost=1",
            )
        return found
    if kind in ("node", "rack"):
        named = [pool for pool in cluster.pools if not colon or pool.name == name]
        if not named:
            raise ConfigError(
                f"there is no pool {name!r}",
                where=f"--what-if {text}",
                remedy=f"use lost=node:{cluster.pools[0].name}",
            )
        pool = named[0]
        if kind == "rack" and not pool.nodes_per_rack:
            raise ConfigError(
                f"the racks of the pool {pool.name} are not known",
                where=f"--what-if {text}",
                remedy=f"give it nodes_per_rack, or use lost=node:{pool.name}",
            )
        return {pool.name: 1 if kind == "node" else min(pool.nodes_per_rack, pool.nodes)}
    numbers = [part.strip() for part in what.split(",")]
    if not all(part.isascii() and part.isdigit() for part in numbers):
        raise _unreadable(text)
    if len(numbers) > len(cluster.pools) or not any(map(int, numbers)):
        raise _unreadable(text)
    return {pool.name: int(part) for pool, part in zip(cluster.pools, numbers, strict=False)}


def _unreadable(text: str) -> ConfigError:
    return ConfigError("this is not a loss", where=f"--what-if {text}", remedy=f"write {FORMS}")
