"""Cluster files and short forms: what they mean, and one sentence for each mistake."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import BaseModel

from holdfast.core.flops import dense_peak
from holdfast.errors import DataError, UserError
from holdfast.plan.catalogue import load_catalogue
from holdfast.plan.hardware.cluster import ACROSS_ZONES, Cluster
from holdfast.plan.hardware.cluster_file import (
    BetweenSection,
    ClusterSections,
    DomainLossSection,
    LinkSection,
    PoolSection,
    load_cluster,
    parse_cluster,
    read_cluster,
)
from holdfast.plan.hardware.devices import (
    ASSUMED,
    DEVICES_FILE,
    EFFICIENCY_FILE,
    GIB,
    PRECISIONS,
    device_named,
    device_reported,
    load_devices,
)
from holdfast.plan.hardware.link import LINKS_FILE, link_named, load_links
from holdfast.plan.hardware.tables import read_rows

ROOT = Path(__file__).parents[4]
EXAMPLES = ROOT / "examples" / "clusters"
PAGE = ROOT / "docs" / "reference" / "cluster-file.md"
SIZES = {"a100": 64, "five_zones": 640, "mixed_spot": 128, "a100_1024": 1024}
LINKS = load_links()

GOOD = """\
pools:
  a:
    nodes: 4
    devices: 8
    device: A100-80
    zone: east
  b:
    nodes: 2
    devices: 4
    device: V100
    zone: west
    outside: {type: ethernet-100, per: node}
    market: spot
    losses_per_day: 2.4
    burst: 2
    power_w: 250
    memory_gib: 15
between:
  - {zones: [east, west], gbit_s: 20, latency_us: 400, per: node, usd_per_gb: 0.02}
"""


def test_a_file_says_what_there_is() -> None:
    cluster = parse_cluster(GOOD, "c.yaml")
    one, other = cluster.pools
    assert (one.name, one.size, one.device, one.is_spot) == ("a", 32, "A100-80", False)
    assert one.inside == LINKS["nvlink3"].link
    assert one.outside == LINKS["ib-hdr"].link  # what is usual for the device
    assert (other.device, other.is_spot, other.losses_per_day) == ("V100-16@250W,15GiB", True, 2.4)
    assert other.outside.bandwidth == LINKS["ethernet-100"].link.bandwidth / 4
    limited = other.device_type(load_devices())
    assert (limited.power_w, limited.usable_bytes) == (250, 15 * GIB)
    assert limited.peak("bf16") == pytest.approx(125e12 * (250 / 300) ** (1 / 3))
    between = cluster.link_between(other, one)
    assert between == cluster.link_between(one, other)
    assert (between.latency_s, between.bandwidth) == (400e-6, 20e9 / 8 / 8)
    assert cluster.usd_per_gb == {("east", "west"): 0.02}
    assert cluster.zones_without_link() == []
    alone = parse_cluster(GOOD.split("between")[0], "c.yaml")
    assert alone.zones_without_link() == [("east", "west")]
    assert alone.link_between(*alone.pools) == ACROSS_ZONES


def test_racks_whose_nodes_share_nvlink() -> None:
    text = PAGE.read_text("utf-8").split("NVLink, too:\n\n")[1].split("\n\n")[0]
    (rack,) = parse_cluster(dedent(text), "c.yaml").pools
    assert (rack.size, rack.outside, rack.across_racks) == (144, rack.inside, LINKS["ib-ndr"].link)


@pytest.mark.parametrize("name", SIZES)
def test_the_examples_are_right(name: str) -> None:
    assert {path.stem for path in EXAMPLES.iterdir()} == SIZES.keys()
    cluster = load_cluster(EXAMPLES / f"{name}.yaml")
    assert cluster.size == SIZES[name]
    zones = {pool.zone for pool in cluster.pools}
    assert len(cluster.between) == len(zones) * (len(zones) - 1) // 2


@pytest.mark.parametrize(
    ("text", "pools"),
    [
        ("16x8xH100-80", [("H100-80", 16, 8, False, None)]),
        ("8xH100", [("H100-80", 1, 8, False, None)]),
        ("2x8xH100@500W,70GiB", [("H100-80@500W,70GiB", 2, 8, False, None)]),
        ("4x8xA100-80+2x4xT4", [("A100-80", 4, 8, False, None), ("T4", 2, 4, False, None)]),
        ("16xaws/us-east-2/p5.48xlarge:spot", [("H100-80", 16, 8, True, 21.47)]),
        ("3xaws/us-east-2/p5.48xlarge", [("H100-80", 3, 8, False, 55.04)]),
    ],
)
def test_short_forms(text: str, pools: list[tuple[object, ...]]) -> None:
    found = [
        (p.device, p.nodes, p.devices, p.is_spot, p.usd_per_hour) for p in read_cluster(text).pools
    ]
    assert found == pools


def test_a_machine_of_the_catalogue_brings_price_network_and_losses() -> None:
    spot = read_cluster("2xaws/us-east-1/p4d.24xlarge:spot").pools[0]
    assert spot.outside.bandwidth == pytest.approx(0.8 * 400e9 / 8 / 8)
    assert spot.losses_per_day == pytest.approx(0.0044, rel=0.01)  # 12.5 % a month
    assert spot.priced == "2025-11-30"


MISTAKES = [  # old text, new text; line and what it says; offer
    ("device: A100-80", "device: A100-81", "5: there is no device 'A100-81'", "use A100-80"),
    ("type: ethernet-100", "type: ethernt-100", "12: there is no link", "use ethernet-100"),
    (
        "device: A100-80",
        "machine: aws/us-east-1/p4d.24xlarg",
        "5: there is no machine",
        "use aws/us",
    ),
    ("devices: 8", "device_count: 8", "4: unknown key pools.a.device_count", "use device"),
    ("[east, west]", "[east, wst]", "19: no pool is in the zone 'wst'", "use west"),
    ("[east, west]", "[east, east]", "19: the link between east and east is given", "keep one"),
    ("nodes: 4", "nodes: -4", "3: pools.a.nodes is -4", "use 1"),
    ("usd_per_gb: 0.02", "usd_per_gb: -1", "19: between.0.usd_per_gb is -1", "use 0"),
    ("gbit_s: 20, ", "", "19: between.0 does not say how fast it is", "give it a type"),
    ("nodes: 4", "nodes: many", "3: pools.a.nodes is 'many'", "write for example 'nodes: 8'"),
    ("market: spot", "market: spott", "13: pools.b.market is 'spott'", "use spot"),
    ("    nodes: 4\n", "", "2: pools.a.nodes is missing", "write for example 'nodes: 8'"),
    ("    devices: 8\n", "", "2: pools.a does not say which devices", "write 'device"),
    ("  b:\n", "  a:\n", "7: pools.a was already given on line 2", "keep one"),
    ("power_w: 250", "power_w: 350", "16: the limit of power is 350, and V100-16 has", "use"),
    ("memory_gib: 15", "memory_gib: 32", "16: the limit of memory is 32, and V100-16", "use"),
    ("burst: 2", "burst: 3", "15: pools.b.burst is 3, but there are 2 nodes", "use 2 or less"),
    ("zone: east", "across_racks: ib-hdr", "6: pools.a.across_racks is a link between", "give"),
    ("    losses_per_day: 2.4\n", "", "7: pools.b is spot", "write 'losses_per"),
]
NO_CLUSTERS = [
    ("pools: {}\n", ":1: pools has 0 items", "write 'pools:'"),
    ("- a\n", ": a cluster file is made of sections and keys", "begin with 'pools"),
    ("", ": a cluster file is made of sections and keys", "begin with 'pools"),
    ("pools:\n  a: 3\n", ":2: pools.a is 3", "write 'pools:'"),
    ("pools: [\n", ":2: this is not valid YAML", "write 'key: value'"),
    ("pools: &a\n", ":1: anchors", "write"),
]


@pytest.mark.parametrize(
    ("text", "start", "offer"),
    [*((GOOD.replace(o, n), f":{start}", offer) for o, n, start, offer in MISTAKES), *NO_CLUSTERS],
)
def test_a_mistake_gets_one_sentence_with_its_place(text: str, start: str, offer: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_cluster(text, "c.yaml")
    assert str(refused.value).startswith(f"c.yaml{start}")
    assert str(refused.value).rpartition("; ")[2].startswith(offer)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_several_mistakes_come_at_once() -> None:
    text = GOOD.replace("nodes: 4", "nodes: 0").replace("burst: 2", "burst: 0")
    with pytest.raises(UserError) as refused:
        parse_cluster(text, "c.yaml")
    assert [line.split(":")[1] for line in str(refused.value).splitlines()] == ["3", "15"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("16x8xH100-8O", "--cluster: there is no device 'H100-8O'; use H100-80"),
        (
            "2x8xH100@5kW",
            "--cluster: '5kW' is no limit of a device; write for example H100-80@700W",
        ),
        ("0x8xT4", "--cluster: nodes is 0, but must be at least 1; use 1"),
        ("1xT4+1xT4", "--cluster: two pools have the name T4; add up their nodes"),
        ("2xp5.48xlarge", "--cluster: several regions have the machine .*; use aws/us-east-1/p5.*"),
        ("no.yaml", "no.yaml: the cluster file cannot be read .*; name a YAML file"),
    ],
)
def test_mistakes_of_short_forms(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read_cluster(text)


def test_this_machine_is_a_cluster() -> None:
    assert isinstance(read_cluster("here"), Cluster)


def rows_of(section: type[BaseModel], prefix: str) -> Iterator[str]:
    """The rows of the page's table."""
    for key, info in section.model_fields.items():
        default = (
            "required"
            if info.is_required()
            else info.get_default()
            if info.default_factory is None
            else ""
        )
        words = "" if default in (None, "", ()) else str(default)
        yield f"| `{prefix}{key}` | {words} | {info.description} |"


def test_the_page_has_every_key() -> None:
    page = PAGE.read_text("utf-8")
    for section, prefix in (
        (ClusterSections, ""),
        (PoolSection, "pools.NAME."),
        (LinkSection, "LINK."),
        (BetweenSection, "between."),
        (DomainLossSection, "domain_losses_per_day."),
    ):
        inherited = LinkSection.model_fields if section is BetweenSection else {}
        for row in rows_of(section, prefix):
            if row.split("`")[1].removeprefix(prefix) not in inherited:
                assert row in page


# --- the tables of devices and links --------------------------------------------------------------
DEVICES = load_devices()

REPORTED = {  # as nvidia-smi, or the kernel's driver, writes them, with GiB
    ("Tesla V100-SXM2-16GB", 16): "V100-16",
    ("Tesla V100-SXM3-32GB", 31.7): "V100-32",
    ("NVIDIA A100-SXM4-40GB", 40): "A100-40",
    ("NVIDIA A100-SXM4-80GB", 80): "A100-80",
    ("NVIDIA H100 80GB HBM3", 79.6): "H100-80",
    ("NVIDIA H100 PCIe", 79.6): "H100-PCIe",
    ("NVIDIA H100 NVL", 93.6): "H100-NVL",
    ("NVIDIA H200", 140.4): "H200",
    ("NVIDIA GH200 480GB", 95.6): "GH200-96",
    ("NVIDIA GH200 144G HBM3e", 141): "GH200-144",
    ("NVIDIA B200", 179): "B200",
    ("NVIDIA GB300", 277): "GB300",
    ("AMD Instinct MI300X", 192): "MI300X",
    ("NVIDIA L4", 22.5): "L4",
    ("NVIDIA L40S", 45): "L40S",
    ("NVIDIA A10G", 22.5): "A10G",
    ("Tesla T4", 15): "T4",
    ("NVIDIA GeForce RTX 4090", 24): "RTX-4090",
}


def test_every_row_is_complete_and_possible() -> None:
    for name, device in DEVICES.items():
        assert device.source, name
        assert 0 < device.usable_bytes <= device.memory_bytes, name
        assert 0 < device.idle_w < device.power_w, name
        peaks = [device.flops.get(each, inf) for each in PRECISIONS]
        assert peaks == sorted(peaks), name
        scale_up = LINKS[device.scale_up_link].peak if device.scale_up_link else 0
        assert device.scale_up == scale_up, name
        assert not device.host_link or device.host_link in LINKS, name
        assert device.network_link in LINKS, name
    for row in read_rows(DEVICES_FILE):
        assert None not in row, row["name"]
        assert set(row["assumed"].split()) <= row.keys(), row["name"]
        assert not row["like"] or row["like"] in DEVICES, row["name"]
    for row in read_rows(LINKS_FILE):
        assert None not in row, row["name"]
        assert set(row["assumed"].split()) <= row.keys(), row["name"]
    for link in LINKS.values():
        assert 0 < link.link.bandwidth <= link.peak
        assert link.link.latency_s > 0
        assert link.source
    for row in read_rows(EFFICIENCY_FILE):
        assert row["device"] in DEVICES
        assert row["precision"] in PRECISIONS
        assert row["source"]


def test_shares_hold_for_devices_that_are_alike(tmp_path: Path) -> None:
    head = "device,precision,compute,memory,ramp_s,launch_s,source"
    rows = ("A100-80,bf16,0.6,0.7,1e-6,2e-6,here", "A100-40,fp32,0.5,0.7,1e-6,2e-6,here")
    file = tmp_path / "efficiency.csv"
    file.write_text("\n".join((head, *rows)))
    devices = load_devices(efficiency=file)
    assert devices["A100-40"].reached("bf16").compute == 0.6
    assert devices["A100-40"].reached("fp32").compute == 0.5
    assert devices["A100-80"].reached("fp32") == ASSUMED
    assert devices["T4"].reached("bf16") == ASSUMED


def test_all_tables_of_peaks_agree() -> None:
    compared = 0
    for (reported, _gib), name in REPORTED.items():
        found = dense_peak(reported, "bf16")
        if found is not None:
            assert found == DEVICES[name].peak("bf16"), name
            compared += 1
    assert compared > 10
    for machine in load_catalogue():
        device = device_named(machine.accelerator, DEVICES)
        assert machine.tflops * 1e12 == machine.count * device.peak("bf16"), machine.type


@pytest.mark.parametrize(("reported", "gib"), REPORTED)
def test_a_device_is_found_by_the_name_that_its_driver_reports(reported: str, gib: float) -> None:
    found = device_reported(reported, gib * GIB, DEVICES)
    assert found is not None
    assert found.name == REPORTED[reported, gib]


def test_names_that_are_not_there() -> None:
    assert device_reported("Some GPU", 8 * GIB, DEVICES) is None
    assert device_named("GH-96", DEVICES).name == "GH200-96"
    with pytest.raises(DataError, match="there is no device 'h100-sx'; use H100") as refused:
        device_named("h100-sx", DEVICES)
    assert refused.value.exit_code == 2
    with pytest.raises(DataError, match="there is no link 'infiniband-ndr'; use ib-ndr"):
        link_named("infiniband-ndr", LINKS)
    with pytest.raises(DataError, match="fp8; use one of fp32, bf16"):
        DEVICES["A100-80"].peak("fp8")
