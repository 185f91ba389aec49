"""`governance.regions`: a node, a peer or a bucket elsewhere is refused before a byte moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.config.loading.load import LoadedConfig
from holdfast.config.loading.paths import paths_of
from holdfast.config.sections.governance import GovernanceConfig
from holdfast.errors import ConfigError
from holdfast.launch.node.node_place import ZONE_VARIABLE, told_places
from holdfast.wire.store.location import parse_location

KEY, OWN_ZONE = "governance.regions", "checkpoint.machine.zone"


def refuse_other_regions(loaded: LoadedConfig) -> None:
    """Check this node, its peers, and every address of the run. Folders lie on the node.

    Raises ConfigError for what lies elsewhere, and for what does not say where it lies."""
    for key, zone, remedy in _places(loaded):
        what = "this machine" if key == OWN_ZONE else key
        _refuse(loaded.config.governance, zone, what, loaded.where(key), remedy)


def refuse_visitor_elsewhere(governance: GovernanceConfig, environ: Mapping[str, str]) -> None:
    """The same for a machine that helps a run, and for its environment. Raises ConfigError."""
    zone = told_places(environ).get("zone", "")
    _refuse(governance, zone, "this machine", ZONE_VARIABLE, f"set {ZONE_VARIABLE}")


def _refuse(governance: GovernanceConfig, zone: str, what: str, where: str, remedy: str) -> None:
    allowed = f"{KEY} allows {', '.join(governance.regions)}"
    if governance.regions and not zone:
        raise ConfigError(
            f"nothing says in which region {what} lies, and {allowed}", where=where, remedy=remedy
        )
    if governance.regions and not governance.allows(zone):
        raise ConfigError(
            f"{what} lies in {zone}, and {allowed}",
            where=where,
            remedy=f"use a place there, or add the region to {KEY}",
        )


def _places(loaded: LoadedConfig) -> Iterator[tuple[str, str, str]]:
    """Yield keys with their zones, and how to say an unknown one."""
    checkpoint = loaded.config.checkpoint
    remedy = f"set {OWN_ZONE}, or {ZONE_VARIABLE} in the environment"
    yield OWN_ZONE, checkpoint.machine.zone, remedy
    for number, peer in enumerate(checkpoint.peers):
        remedy = "add a zone to the peer"
        yield f"checkpoint.peers.{number}.zone", peer.zone, remedy
    for key, place in paths_of(loaded.config):
        scheme = place.partition("://")[0] if "://" in place else ""
        if scheme == "s3":
            yield key, parse_location(place).region, "add ?region= to the address"
        elif scheme not in ("", "file"):
            yield key, "", "use a folder, or a bucket of s3:// with ?region="
