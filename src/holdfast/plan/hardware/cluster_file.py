"""Cluster files, and short forms of a cluster on the command line.

    load_cluster(Path("cluster.yaml"))
    read_cluster("16x8xH100-80")                     16 nodes of 8
    read_cluster("4x8xA100-80+2x8xV100-16")          two pools
    read_cluster("16xaws/us-east-1/p5.48xlarge:spot")
    read_cluster("here")                             this machine

Every refusal names the line, and what would work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from holdfast.config.loading.explain import nearest_value, what_is_wrong
from holdfast.config.loading.fields import field_at, siblings
from holdfast.config.loading.yaml_tree import parse_file
from holdfast.config.sections.base import Section
from holdfast.errors import ConfigError, DataError, nearest_of, unknown_name, use_one_of
from holdfast.plan.catalogue import MachineType, load_catalogue
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.devices import DeviceType, device_named, limits_text, load_devices
from holdfast.plan.hardware.link import WIDE, Link, LinkType, link_named, load_links
from holdfast.plan.hardware.tables import read_rows

HARDWARE_LOSSES_PER_DAY = 0.0038
"""Of one on-demand node: Llama 3 lost 3.79 of 1,000 nodes of eight devices a day."""


class LinkSection(Section):
    """A link. Its name alone may stand in place of the section."""

    type: str | None = Field(
        None, description="row of links.csv, for latency and reach", examples=["ib-ndr"]
    )
    gbit_s: float | None = Field(
        None, gt=0, description="Gbit/s, one way, in place of the type's", examples=[400]
    )
    latency_us: float | None = Field(
        None,
        gt=0,
        description="microseconds of a small message, in place of the type's",
        examples=[10],
    )
    per: Literal["device", "node"] | None = Field(
        None,
        description="whether the bandwidth is of one device or of a node. Left out: of a node "
        "between zones and regions, otherwise of a device",
        examples=["node"],
    )


class BetweenSection(LinkSection):
    """The link between two zones."""

    zones: Annotated[tuple[str, ...], Field(min_length=2, max_length=2)] = Field(
        description="two zones that pools name", examples=["[zone-a, zone-b]"]
    )
    usd_per_gb: float = Field(
        0.0, ge=0, description="price of 1e9 bytes that leave a zone; no objective counts it"
    )


class PoolSection(Section):
    """Like nodes in one place."""

    nodes: int = Field(ge=1, description="how many", examples=[8])
    machine: str | None = Field(
        None,
        description="type of catalogue.csv as CLOUD/REGION/TYPE. It gives device, devices, "
        "outside, usd_per_hour, and losses_per_day of spot, unless the pool gives them",
        examples=["aws/us-east-1/p5.48xlarge"],
    )
    device: str | None = Field(
        None, description="row of devices.csv, or one of its aliases", examples=["A100-80"]
    )
    devices: int | None = Field(None, ge=1, description="of one node", examples=[8])
    inside: LinkSection | None = Field(
        None,
        description="between two devices of a node; left out: the device's own",
        examples=["nvlink4"],
    )
    outside: LinkSection | None = Field(
        None,
        description="of one device to another node, while all devices of the node send; left out: "
        "the machine's, or what is usual for the device",
        examples=["ib-ndr"],
    )
    zone: str = Field("", description="its name; pools of one zone use their own links")
    nodes_per_rack: int = Field(0, ge=0, description="0: racks are not known")
    across_racks: LinkSection | None = Field(
        None,
        description="as outside, to a node of another rack; left out: the same",
        examples=["ethernet-100"],
    )
    nodes_per_power_domain: int = Field(
        0, ge=0, description="nodes that lose power together; 0: not known"
    )
    market: Literal["on-demand", "spot"] = Field(
        "on-demand", description="spot: the cloud may take nodes back"
    )
    usd_per_hour: float | None = Field(
        None,
        ge=0,
        description="of one node; left out: the machine's, or not known. 0 is a price",
        examples=[27.4],
    )
    priced: str = Field("", description="date of the price", examples=["2026-07-22"])
    losses_per_day: float | None = Field(
        None,
        ge=0,
        description="of one node. Left out: the machine's for spot, "
        f"{HARDWARE_LOSSES_PER_DAY} for on-demand (Llama 3's nodes)",
        examples=[2.4],
    )
    burst: float = Field(1.0, ge=1, description="nodes that one interruption takes on average")
    grams_co2_per_kwh: float | None = Field(
        None, ge=0, description="of the zone's power; left out: not known", examples=[400]
    )
    power_w: float | None = Field(
        None, gt=0, description="limit of one device, at most the type's", examples=[300]
    )
    memory_gib: float | None = Field(
        None,
        gt=0,
        description="memory of one device that a run may use, at most the type's",
        examples=[70],
    )


class DomainLossSection(Section):
    """Losses of complete domains. A rate that is left out is the assumed one."""

    rack: float | None = Field(None, ge=0, description="losses of a rack a day", examples=[0.002])
    power: float | None = Field(
        None, ge=0, description="losses of a power domain a day", examples=[0.0005]
    )
    pool: float | None = Field(
        None, ge=0, description="bursts of spot losses a pool and day", examples=[2]
    )
    zone: float | None = Field(None, ge=0, description="losses of a zone a day", examples=[0.001])


class ClusterSections(Section):
    """The file."""

    pools: Annotated[dict[str, PoolSection], Field(min_length=1)] = Field(
        description="by their names"
    )
    between: tuple[BetweenSection, ...] = Field((), description="links between zones")
    domain_losses_per_day: DomainLossSection = Field(
        default_factory=DomainLossSection,
        description="how often complete domains are lost",
        examples=["{rack: 0.002}"],
    )


HERE = "here"
MACHINES_FILE = Path(__file__).with_name("machines.csv")
_GBIT = 1e9 / 8
_SHORT = re.compile(
    r"(?P<nodes>\d+)x(?:(?P<devices>\d+)x)?(?P<name>[A-Za-z][\w./@,-]*?)(?P<spot>:spot)?"
)
KeyPath = tuple[str | int, ...]
Where = Callable[[KeyPath], str]
"""The place of a key, for messages."""
_SECTIONS_OF_LINKS = ("inside", "outside", "across_racks")


@dataclass(frozen=True)
class Tables:
    """What the names of a cluster file mean."""

    devices: Mapping[str, DeviceType] = field(default_factory=load_devices)
    links: Mapping[str, LinkType] = field(default_factory=load_links)
    machines: tuple[MachineType, ...] = field(default_factory=lambda: tuple(load_catalogue()))
    networks: Mapping[str, tuple[str, float]] = field(
        default_factory=lambda: {
            row["type"]: (row["link"], float(row["network_gbit_s"]))
            for row in read_rows(MACHINES_FILE)
        }
    )


def read_cluster(text: str, tables: Tables | None = None, where: str = "--cluster") -> Cluster:
    """A cluster by its file, its short form, or `here`. where: the place of a short form, for
    messages. Raises ConfigError or DataError."""
    if text == HERE:
        from holdfast.plan.hardware.this_machine import this_machine

        return this_machine()
    parts = [_SHORT.fullmatch(part) for part in text.split("+")]
    if not Path(text).exists() and all(parts):
        return _short_cluster([part for part in parts if part], tables or Tables(), where)
    return load_cluster(Path(text), tables)


def load_cluster(path: Path, tables: Tables | None = None) -> Cluster:
    """The cluster of a file. Raises ConfigError, with the line, for a mistake in it."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(
            f"the cluster file cannot be read ({words})",
            where=str(path),
            remedy="name a YAML file, here for this machine, or a short form as 16x8xH100-80",
        ) from None
    return parse_cluster(text, str(path), tables)


def parse_cluster(text: str, name: str, tables: Tables | None = None) -> Cluster:
    """The cluster of a file's text."""
    value, lines = parse_file(text, name)

    def where(path: KeyPath) -> str:
        """Return the line of a key: its own, or that of the nearest key around it."""
        lengths = (n for n in range(len(path), 0, -1) if path[:n] in lines)
        return f"{name}:{lines[path[:length]]}" if (length := next(lengths, 0)) else name

    if not isinstance(value, dict):
        raise ConfigError(
            "a cluster file is made of sections and keys, and this is not",
            where=name,
            remedy="begin with 'pools:', as examples/clusters/a100.yaml does",
        )
    try:
        # Write `outside: ib-ndr` as `outside: {type: ib-ndr}`, and `link: NAME` of a pair likewise.
        pools = value.get("pools")
        if isinstance(pools, dict):
            for pool in (each for each in pools.values() if isinstance(each, dict)):
                for key in _SECTIONS_OF_LINKS:
                    if isinstance(pool.get(key), str):
                        pool[key] = {"type": pool[key]}
        sections = ClusterSections.model_validate(value)
    except ValidationError as error:
        raise _refuse_all(error, ClusterSections, where) from None
    return _build(sections, where, tables or Tables())


def _build(sections: ClusterSections, where: Where, tables: Tables) -> Cluster:
    pools = tuple(_pool(name, each, where, tables) for name, each in sections.pools.items())
    zones = {pool.zone for pool in pools if pool.zone}
    between: dict[tuple[str, str], Link] = {}
    prices: dict[tuple[str, str], float] = {}
    for index, each in enumerate(sections.between):
        path: KeyPath = ("between", index)
        for zone in each.zones:
            if zone not in zones:
                raise ConfigError(
                    f"no pool is in the zone {zone!r}",
                    where=where((*path, "zones")),
                    remedy=_other_zone(zone, zones),
                )
        one, other = each.zones
        if one == other or (one, other) in between or (other, one) in between:
            raise ConfigError(
                f"the link between {one} and {other} is given twice, or within one zone",
                where=where((*path, "zones")),
                remedy="keep one link for each pair of zones",
            )
        most = max(pool.devices for pool in pools)
        between[one, other] = _link(each, most, path, where, tables)
        prices[one, other] = each.usd_per_gb
    losses = sections.domain_losses_per_day.model_dump(exclude_none=True)
    for domain, key in _SIZES.items():
        if domain in losses and not any(getattr(pool, key) for pool in pools):
            raise ConfigError(
                f"no pool says which nodes a {domain} has, so its losses would not count",
                where=where(("domain_losses_per_day", domain)),
                remedy=f"give a pool {key}, or remove the rate",
            )
    return Cluster(pools, between, prices, losses)


_SIZES = {"rack": "nodes_per_rack", "power": "nodes_per_power_domain", "zone": "zone"}
"""Domain -> the key of a pool that says where it ends."""


def _other_zone(zone: str, zones: set[str]) -> str:
    if not zones:
        return "give pools a zone, or remove the link"
    return f"use {nearest_of(zone, zones, cutoff=0.3) or sorted(zones)[0]}"


def _pool(name: str, given: PoolSection, where: Where, tables: Tables) -> NodePool:
    path = ("pools", name)
    machine = _machine(given.machine, where((*path, "machine")), tables) if given.machine else None
    device_name = given.device or (machine.accelerator if machine else None)
    count = given.devices or (machine.count if machine else None)
    if device_name is None or count is None:
        raise ConfigError(
            f"pools.{name} does not say which devices its nodes have",
            where=where(path),
            remedy="write 'device: A100-80' and 'devices: 8', or name a machine",
        )
    device = device_named(device_name, tables.devices, where((*path, "device")))
    limits = limits_text(given.power_w or 0.0, given.memory_gib or 0.0)
    key = "power_w" if given.power_w else "memory_gib"
    device = device_named(device.name + limits, tables.devices, where((*path, key)))
    _check_numbers(name, given, where)
    inside = given.inside or LinkSection(type=device.scale_up_link or device.host_link)
    outside = given.outside or LinkSection(type=device.network_link)
    if given.outside is None and machine is not None and machine.type in tables.networks:
        link, gbit = tables.networks[machine.type]
        outside = LinkSection(type=link, gbit_s=gbit, per="node")
    across = given.across_racks
    price = given.usd_per_hour
    if price is None and machine is not None:
        price = machine.spot if given.market == "spot" else machine.on_demand
    return NodePool(
        name,
        given.nodes,
        count,
        device.name,
        _link(inside, count, (*path, "inside"), where, tables),
        _link(outside, count, (*path, "outside"), where, tables),
        given.zone or (machine.region if machine else ""),
        given.nodes_per_rack,
        _link(across, count, (*path, "across_racks"), where, tables) if across else None,
        given.market == "spot",
        price,
        _losses(name, given, machine, where(path)),
        given.burst,
        given.grams_co2_per_kwh,
        given.nodes_per_power_domain,
        given.priced or (machine.date.isoformat() if machine else ""),
    )


def _losses(name: str, given: PoolSection, machine: MachineType | None, where: str) -> float:
    if given.losses_per_day is not None:
        return given.losses_per_day
    if given.market == "on-demand":
        return HARDWARE_LOSSES_PER_DAY
    if machine is None:
        raise ConfigError(
            f"pools.{name} is spot, and nothing says how often it loses a node",
            where=where,
            remedy="write 'losses_per_day: 2.4' (A100 of GCP in 2022), or name a machine",
        )
    return 24 * machine.losses_per_hour


def _check_numbers(name: str, given: PoolSection, where: Where) -> None:
    """Refuse numbers that contradict each other."""
    path = ("pools", name)
    if given.across_racks is not None and not 0 < given.nodes_per_rack < given.nodes:
        raise ConfigError(
            f"pools.{name}.across_racks is a link between racks, but there is one rack",
            where=where((*path, "across_racks")),
            remedy="give nodes_per_rack below nodes, or remove it",
        )
    if given.burst > given.nodes:
        raise ConfigError(
            f"pools.{name}.burst is {given.burst:g}, but there are {given.nodes} nodes",
            where=where((*path, "burst")),
            remedy=f"use {given.nodes} or less",
        )


def _link(given: LinkSection, devices: int, path: KeyPath, where: Where, tables: Tables) -> Link:
    """A link as one device has it while all devices of its node send."""
    per = given.per or "device"
    if given.type is not None:
        kind = link_named(given.type, tables.links, where((*path, "type")))
        per = given.per or ("node" if kind.kind == WIDE else "device")
        latency, reach = kind.link.latency_s, kind.link.bandwidth / kind.peak
        ramp = kind.link.ramp
        peak = kind.peak if given.gbit_s is None else given.gbit_s * _GBIT
    elif given.gbit_s is not None and given.latency_us is not None:
        latency, reach, ramp, peak = 0.0, 1.0, 0.0, given.gbit_s * _GBIT
    else:
        raise ConfigError(
            f"{'.'.join(map(str, path))} does not say how fast it is",
            where=where(path),
            remedy="give it a type, for example 'type: ib-ndr', or both gbit_s and latency_us",
        )
    if given.latency_us is not None:
        latency = given.latency_us / 1e6
    return Link(latency, peak * reach / (devices if per == "node" else 1), ramp)


def _machine(name: str, where: str, tables: Tables) -> MachineType:
    """A row of the catalogue by CLOUD/REGION/TYPE, or by TYPE if one region alone has it."""
    known = {each.name: each for each in tables.machines}
    if name in known:
        return known[name]
    fit = [full for full in known if full.endswith(f"/{name}")]
    if len(fit) == 1:
        return known[fit[0]]
    if fit:
        raise DataError(
            f"several regions have the machine {name!r}", where=where, remedy=f"use {fit[0]}"
        )
    raise unknown_name(DataError, "machine", name, known, where)


def _short_cluster(parts: list[re.Match[str]], tables: Tables, where: str) -> Cluster:
    pools: dict[str, PoolSection] = {}
    names = [each.name for each in tables.machines]
    for part in parts:
        given: dict[str, Any] = {"nodes": int(part["nodes"])}
        if part["devices"]:
            given |= {"devices": int(part["devices"]), "device": part["name"]}
        elif part["name"] in tables.devices or not any(
            f"/{each}".endswith(f"/{part['name']}") for each in names
        ):
            given |= {"devices": int(part["nodes"]), "device": part["name"], "nodes": 1}
        else:
            given["machine"] = part["name"]
        given["market"] = "spot" if part["spot"] else "on-demand"
        name = part["name"] + (part["spot"] or "").replace(":", "-")
        if name in pools:
            raise ConfigError(
                f"two pools have the name {name}", where=where, remedy="add up their nodes"
            )
        try:
            pools[name] = PoolSection.model_validate(given)
        except ValidationError as error:
            raise _refuse_all(error, PoolSection, lambda path: where) from None
    return _build(ClusterSections(pools=pools), lambda path: where, tables)


def _refuse_all(error: ValidationError, model: type[BaseModel], where: Where) -> ConfigError:
    """One error for all refusals of the schema: one sentence each, with what would work."""
    refusals = [_refusal(details, model, where) for details in error.errors()]
    return refusals[0] if len(refusals) == 1 else ConfigError("\n".join(map(str, refusals)))


def _refusal(details: ErrorDetails, model: type[BaseModel], where: Where) -> ConfigError:
    path: KeyPath = tuple(details["loc"])
    key, place = ".".join(map(str, path)), where(path)
    info, kind = field_at(path, model), details["type"]
    if kind == "extra_forbidden":
        remedy = use_one_of(siblings(path, model), str(path[-1]), cutoff=0.5)
        return ConfigError(f"unknown key {key}", where=place, remedy=remedy)
    if kind == "literal_error" and info is not None:
        remedy = use_one_of(get_args(info.annotation), str(details["input"]))
    else:
        remedy = nearest_value(info, details["input"]) or f"write {_example(path, info)}"
    return ConfigError(f"{key or 'the file'} {what_is_wrong(details)}", where=place, remedy=remedy)


def _example(path: KeyPath, info: FieldInfo | None) -> str:
    if path in ((), ("pools",)) or (path[0] == "pools" and len(path) == 2):
        return "'pools:', below it a name, and below that for example 'nodes: 8'"
    if info is not None and info.examples and isinstance(path[-1], str):
        return f"for example '{path[-1]}: {info.examples[0]}'"
    return f"a value after '{path[-1]}:', or remove the key"
