"""The place of this node: its rack, power domain, spot pool and zone.

The run file's `checkpoint.machine` says it, or the owner of the machines does, in the environment.
For the zone, `cluster.sites` may say it:

    HOLDFAST_PLACE          "rack=r7,zone=us-east-1a", any kinds of `policy/placement.py`
    HOLDFAST_ZONE           the zone, or nothing: Kubernetes fills in a label that may be missing
    SLURM_TOPOLOGY_ADDR     "spine0.leaf3.n12" with topology/tree: leaf3 is the rack

The places of new replicas (`plan/placing/domains.py`) and of copies of snapshots depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.errors import ConfigError
from holdfast.launch.start.facts import Facts
from holdfast.policy.placement import FAILURE_DOMAINS

PLACE_VARIABLE = "HOLDFAST_PLACE"
ZONE_VARIABLE = "HOLDFAST_ZONE"
SLURM_VARIABLE, SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
MACHINE_KEYS = tuple(f"checkpoint.machine.{kind}" for kind in FAILURE_DOMAINS)
"""Keys of one node: another node that joins does not inherit them."""


def by_place(loaded: LoadedConfig, facts: Facts) -> PlannedValues:
    """Return the domains that the run file leaves open. A node's site is its zone.

    Raises ConfigError for a HOLDFAST_PLACE that names none."""
    machine, cluster = loaded.config.checkpoint.machine, loaded.config.cluster
    site = cluster.site_of(cluster.node or facts.hardware.node)
    places = {} if site is None else {"zone": (site.name, "cluster.sites")}
    told = told_places(facts.environ).items()
    places |= {kind: (name, "the environment's") for kind, name in told}
    return {
        f"checkpoint.machine.{kind}": value
        for kind, value in places.items()
        if not getattr(machine, kind)
    }


def told_places(environ: Mapping[str, str]) -> dict[str, str]:
    """The domains that the environment names. Raises ConfigError for a HOLDFAST_PLACE that names
    none."""
    told = {kind: name for kind, name in _from_slurm(environ).items() if name}
    if zone := environ.get(ZONE_VARIABLE):
        told["zone"] = zone
    text = environ.get(PLACE_VARIABLE, "")
    found: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        kind, _, name = part.partition("=")
        if kind not in FAILURE_DOMAINS or not name:
            raise ConfigError(
                f"{part!r} names no place",
                where=PLACE_VARIABLE,
                remedy=f"write KIND=NAME with one of {', '.join(FAILURE_DOMAINS)}",
            )
        found[kind] = name
    return told | found


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """The switch that the node hangs on, by Slurm's own path of it."""
    parts = environ.get(SLURM_VARIABLE, "").split(".")
    kinds = environ.get(SLURM_PATTERN, "").split(".")
    if len(parts) < 2 or len(parts) != len(kinds) or kinds[-2:] != ["switch", "node"]:
        return {}  # topology/none gives the node alone
    return {"rack": parts[-2]}
