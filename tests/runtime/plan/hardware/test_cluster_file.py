"""Cluster files and short forms: what they mean, and one sentence for each mistake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import BaseModel

from holdfast.errors import UserError
from holdfast.plan.hardware.cluster import ACROSS_ZONES, Cluster
from holdfast.plan.hardware.cluster_file import (
    BetweenSection,
    ClusterSections,
    LinkSection,
    PoolSection,
    load_cluster,
    parse_cluster,
    read_cluster,
)
from holdfast.plan.hardware.devices import GIB, load_devices
from holdfast.plan.hardware.link import load_links

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


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


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
        ("16x8xH100-80", [("H100-80", 16, 8, False, 0.0)]),
        ("8xH100", [("H100-80", 1, 8, False, 0.0)]),
        ("2x8xH100@500W,70GiB", [("H100-80@500W,70GiB", 2, 8, False, 0.0)]),
        ("4x8xA100-80+2x4xV100-16", [("A100-80", 4, 8, False, 0.0), ("V100-16", 2, 4, False, 0.0)]),
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


MISTAKES = {
    "unknown device": (
        changed("device: A100-80", "device: A100-81"),
        r"c.yaml:5: there is no device 'A100-81'; use A100-80",
    ),
    "unknown link": (
        changed("type: ethernet-100", "type: ethernt-100"),
        r"c.yaml:12: there is no link 'ethernt-100'; use ethernet-100",
    ),
    "unknown machine": (
        changed("device: A100-80", "machine: aws/us-east-1/p4d.24xlarg"),
        r"c.yaml:5: there is no machine '.*'; use aws/us-east-1/p4d.24xlarge",
    ),
    "unknown key": (
        changed("devices: 8", "device_count: 8"),
        r"c.yaml:4: unknown key pools.a.device_count; use devices?",
    ),
    "unknown zone": (
        changed("zones: [east, west]", "zones: [east, wst]"),
        r"c.yaml:19: no pool is in the zone 'wst'; use west",
    ),
    "one zone": (
        changed("zones: [east, west]", "zones: [east, east]"),
        r"c.yaml:19: the link between east and east is given twice, or within one zone; keep one",
    ),
    "negative": (
        changed("nodes: 4", "nodes: -4"),
        r"c.yaml:3: pools.a.nodes is -4, but must be at least 1; use 1",
    ),
    "negative price": (
        changed("usd_per_gb: 0.02", "usd_per_gb: -1"),
        r"c.yaml:19: between.0.usd_per_gb is -1, but must be at least 0; use 0",
    ),
    "no speed": (
        changed("gbit_s: 20, ", ""),
        r"c.yaml:19: between.0 does not say how fast it is; give it a type",
    ),
    "a word for a number": (
        changed("nodes: 4", "nodes: many"),
        r"c.yaml:3: pools.a.nodes is 'many', not a whole number; write for example 'nodes: 8'",
    ),
    "a word that is not one of two": (
        changed("market: spot", "market: spott"),
        r"c.yaml:13: pools.b.market is 'spott', not one of on-demand, spot; use spot",
    ),
    "missing": (
        changed("    nodes: 4\n", ""),
        r"c.yaml:2: pools.a.nodes is missing; write for example 'nodes: 8'",
    ),
    "no devices": (
        changed("    devices: 8\n", ""),
        r"c.yaml:2: pools.a does not say which devices its nodes have; write 'device",
    ),
    "two pools of one name": (
        changed("  b:\n", "  a:\n"),
        r"c.yaml:7: pools.a was already given on line 2; keep one",
    ),
    "power above the board's": (
        changed("power_w: 250", "power_w: 350"),
        r"c.yaml:16: the limit of power is 350, and V100-16 has 40 to 300; use",
    ),
    "memory that is not there": (
        changed("memory_gib: 15", "memory_gib: 32"),
        r"c.yaml:16: the limit of memory is 32, and V100-16@?.* has 0 to 16; use",
    ),
    "burst of more nodes than there are": (
        changed("burst: 2", "burst: 3"),
        r"c.yaml:15: pools.b.burst is 3, but there are 2 nodes; use 2 or less",
    ),
    "racks without a number": (
        changed("zone: east", "across_racks: ib-hdr"),
        r"c.yaml:6: pools.a.across_racks is a link between racks, but there is one rack; give",
    ),
    "spot that is never lost": (
        changed("    losses_per_day: 2.4\n", ""),
        r"c.yaml:7: pools.b is spot, and nothing says how often it loses a node; write 'losses_per",
    ),
    "no pools": ("pools: {}\n", r"c.yaml:1: pools has 0 items; write 'pools:'"),
    "a list": (
        "- a\n",
        r"c.yaml: a cluster file is made of sections and keys.*; begin with 'pools",
    ),
    "empty": ("", r"c.yaml: a cluster file is made of sections and keys"),
    "a pool without keys": (
        "pools:\n  a: 3\n",
        r"c.yaml:2: pools.a is 3, not a section of keys; write 'pools:'",
    ),
    "not YAML": ("pools: [\n", r"c.yaml:2: this is not valid YAML .*; write 'key: value'"),
    "an anchor": ("pools: &a\n", r"c.yaml:1: anchors .* are not used in this file; write"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_sentence_with_its_place(name: str) -> None:
    text, sentence = MISTAKES[name]
    with pytest.raises(UserError, match=f"^{sentence}") as refused:
        parse_cluster(text, "c.yaml")
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
        default = "required" if info.is_required() else info.get_default()
        words = "" if default in (None, "", ()) else str(default)
        yield f"| `{prefix}{key}` | {words} | {info.description} |"


def test_the_page_has_every_key() -> None:
    page = PAGE.read_text("utf-8")
    for section, prefix in (
        (ClusterSections, ""),
        (PoolSection, "pools.NAME."),
        (LinkSection, "LINK."),
        (BetweenSection, "between."),
    ):
        inherited = LinkSection.model_fields if section is BetweenSection else {}
        for row in rows_of(section, prefix):
            if row.split("`")[1].removeprefix(prefix) not in inherited:
                assert row in page
