"""The keys of a cluster file. docs/reference/cluster-file.md lists them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast.config.sections.base import Section

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
    usd_per_gb: float = Field(0.0, ge=0, description="price of 1e9 bytes that leave a zone")


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
        None, ge=0, description="of one node; left out: the machine's, or 0", examples=[27.4]
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
    grams_co2_per_kwh: float = Field(0.0, ge=0, description="of the zone's power")
    power_w: float | None = Field(
        None, gt=0, description="limit of one device, at most the type's", examples=[300]
    )
    memory_gib: float | None = Field(
        None,
        gt=0,
        description="memory of one device that a run may use, at most the type's",
        examples=[70],
    )


class ClusterSections(Section):
    """The file."""

    pools: Annotated[dict[str, PoolSection], Field(min_length=1)] = Field(
        description="by their names"
    )
    between: tuple[BetweenSection, ...] = Field((), description="links between zones")
