"""`governance.regions`: a node, a peer or a bucket elsewhere is refused before a byte moves."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast.config.loading.load import LoadedConfig
from holdfast.config.loading.paths import paths_of
from holdfast.config.sections.governance import GovernanceConfig
from holdfast.errors import ConfigError
from holdfast.launch.node.node_place import ZONE_VARIABLE, told_places
from holdfast.wire.store.location import parse_location

KEY, OWN_ZONE = "governance.regions", "checkpoint.machine.zone"
REGIONS_FILE = "governance.json"  # in an exported folder


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


def refuse_copy_elsewhere(governance: GovernanceConfig, to: str, where: str) -> None:
    """Check this machine, and the place that gets bytes of a run. Raises ConfigError."""
    refuse_visitor_elsewhere(governance, os.environ)
    for zone, remedy in _zone_of(to):
        _refuse(governance, zone, to.partition("?")[0], where, remedy)


def note_regions(folder: Path, governance: GovernanceConfig) -> None:
    """Write into the folder of a model where it may lie, so that a copy of it is checked too."""
    if governance.regions:
        (folder / REGIONS_FILE).write_text(json.dumps({"regions": governance.regions}) + "\n")


def noted_regions(folder: Path) -> GovernanceConfig:
    """Return where the folder of a model may lie. Raises ConfigError for a damaged note."""
    path = folder / REGIONS_FILE
    try:
        note = json.loads(path.read_text("utf-8")) if path.exists() else {}
        return GovernanceConfig.model_validate(note)
    except (OSError, ValueError):
        raise ConfigError(
            "this note of regions cannot be read", where=str(path), remedy="export the model again"
        ) from None


def refuse_region(governance: GovernanceConfig, region: str) -> None:
    """Check the region in which a cloud is to start nodes. Raises ConfigError."""
    _refuse(governance, region, "a machine of this order", "--region", "name it with --region")


def _refuse(governance: GovernanceConfig, zone: str, what: str, where: str, remedy: str) -> None:
    """zone: "" if it is not known; `remedy` says how to name it."""
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
    own = checkpoint.machine.zone or told_places(os.environ).get("zone", "")
    yield OWN_ZONE, own, remedy
    for number, peer in enumerate(checkpoint.peers):
        remedy = "add a zone to the peer"
        yield f"checkpoint.peers.{number}.zone", peer.zone, remedy
    for key, place in paths_of(loaded.config):
        for zone, remedy in _zone_of(place):
            yield key, zone, remedy
    for number, source in enumerate(loaded.config.data.sources):
        if source.kind == "huggingface" and not os.path.isdir(source.place or ""):
            key = f"data.sources.{number}.path"
            yield key, "", "download the data set there, and name its folder"


def _zone_of(place: str) -> Iterator[tuple[str, str]]:
    """Yield the zone of an address, and how to say an unknown one. A folder has none."""
    scheme = place.partition(":")[0] if re.match(r"mlflow:|\w+://", place) else "file"
    if scheme == "s3":
        yield parse_location(place).region, "add ?region= to the address"
    elif scheme != "file":
        yield "", "use a folder, or a bucket of s3:// with ?region="
