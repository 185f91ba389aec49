"""A run's configuration under a launcher, which says how many workers there are, and where."""

from __future__ import annotations

from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.errors import ConfigError
from holdfast.launch.start.facts import Facts


def by_launcher(loaded: LoadedConfig, facts: Facts) -> PlannedValues:
    """Return what the launcher decides: workers, and name and places of this node.

    Raises ConfigError if the run file says something else."""
    place = facts.launcher
    if place is None:
        return {}
    planned: dict[str, str | int] = {"layout.workers": place.world}
    if place.local_world < place.world:
        planned |= {"cluster.places": place.local_world, "cluster.node": place.node}
    given = loaded.config
    said = {
        "layout.workers": given.layout.workers,
        "cluster.places": given.cluster.places,
        "cluster.node": given.cluster.node,
    }
    for key, value in planned.items():
        if said[key] and said[key] != value:
            raise ConfigError(
                f"{key} is {said[key]}, and {place.launcher} says {value}",
                where=loaded.where(key),
                remedy=f"leave it out, or use {value}",
            )
    return {key: (value, f"what {place.launcher} says") for key, value in planned.items()}
