"""Remedies of messages about devices, links, cluster files and calibrations."""

from __future__ import annotations

from collections.abc import Callable
from re import Match

import pytest

from holdfast.cli import calibrate
from holdfast.core.transports import NodeLinks
from holdfast.machine.accelerators import Accelerator
from holdfast.machine.hardware import HardwareInfo
from holdfast.plan.hardware.calibration import read_calibration
from holdfast.plan.hardware.cluster_file import load_cluster, read_cluster
from holdfast.plan.hardware.devices import device_named, load_devices
from holdfast.plan.hardware.this_machine import describe_machine
from tests.runtime.cli.remedies.lab import Case, Lab, case
from tests.runtime.cli.test_calibrate import fake_rank
from tests.runtime.plan.hardware.test_calibration import measured_by_hand
from tests.runtime.plan.hardware.test_cluster_file import changed

FILE = "cluster.yaml"


def begin(**settings: object) -> Callable[[Lab], None]:
    return lambda lab: lab.settings.update(settings)


def take(key: str) -> Callable[[Lab, Match[str]], None]:
    """Use the value that the remedy names."""
    return lambda lab, found: lab.settings.update({key: found[1]})


def find_device(lab: Lab) -> None:
    device_named(lab.settings["device"], load_devices())


def find_peak(lab: Lab) -> None:
    load_devices()["A100-80"].peak(lab.settings["precision"])


def spoil(old: str, new: str) -> Callable[[Lab], object]:
    return lambda lab: lab.write(FILE, changed(old, new))


def write(text: str) -> Callable[[Lab], object]:
    return lambda lab: lab.write(FILE, text)


def edit(old: str, new: str) -> Callable[[Lab, Match[str]], object]:
    """Write `new` for `old`; {} in it is what the remedy names."""

    def mend(lab: Lab, found: Match[str]) -> None:
        text = (lab.folder / FILE).read_text()
        assert old in text
        lab.write(FILE, text.replace(old, new.format(*found.groups())))

    return mend


def read_file(lab: Lab) -> None:
    load_cluster(lab.folder / FILE)


def read_short(lab: Lab) -> None:
    read_cluster(lab.settings["cluster"])


def look_here(lab: Lab) -> None:
    card = Accelerator(0, "Some Accelerator", 2**34)
    hardware = HardwareInfo("node", "Linux", 2, 2**33, 0, (card,))
    describe_machine(hardware, NodeLinks(), lab.settings.get("calibration"))


def calibrate_it(lab: Lab, found: Match[str]) -> None:
    lab.settings["calibration"] = measured_by_hand("Some Accelerator")


def begin_failing(lab: Lab) -> None:
    fake_rank(lab.folder, after="sys.exit('no such device')")


def measure(lab: Lab) -> None:
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTHONPATH", str(lab.folder))
        changed.setattr(calibrate, "RANK_MODULE", "fake_rank")
        calibrate.calibrate(seconds=5, write=lab.folder / "here.json", json=True)


PLACE = "plan/hardware/cluster_file.py:"
OF_FIELDS = "plan/hardware/refusals.py:"
CASES: list[Case] = [
    case(
        "plan/hardware/tables.py: there is no … …",
        begin(device="A100_80"),
        find_device,
        r"use (\S+)",
        take("device"),
    ),
    case(
        "plan/hardware/devices.py: no peak is known for …",
        begin(precision="fp8"),
        find_peak,
        r"use one of (\w+), .*",
        take("precision"),
    ),
    case(
        f"{PLACE} the cluster file cannot be read (…)",
        begin(cluster="no.yaml"),
        read_short,
        r"name a YAML file, here for this machine, or a short form as (\S+)",
        take("cluster"),
    ),
    case(
        f"{PLACE} two pools have the name …",
        begin(cluster="1xT4+1xT4"),
        read_short,
        r"add up their nodes",
        lambda lab, found: lab.settings.update(cluster="2x1xT4"),
    ),
    case(
        f"{PLACE} several regions have the machine …",
        begin(cluster="2xp5.48xlarge"),
        read_short,
        r"use (\S+)",
        lambda lab, found: lab.settings.update(cluster=f"2x{found[1]}"),
    ),
    case(
        f"{PLACE} a cluster file is made of sections and keys, and this is not",
        write("- a\n"),
        read_file,
        r"begin with 'pools:', as examples/clusters/a100.yaml does",
        edit("- a\n", "pools:\n  a:\n    nodes: 1\n    machine: aws/us-east-1/p4d.24xlarge\n"),
    ),
    case(
        f"{PLACE} no pool is in the zone …",
        spoil("zones: [east, west]", "zones: [east, wst]"),
        read_file,
        r"use (\w+)",
        edit("wst", "{}"),
    ),
    case(
        f"{PLACE} the link between … and … is given twice, or within one zone",
        spoil("zones: [east, west]", "zones: [east, east]"),
        read_file,
        r"keep one link for each pair of zones",
        edit("[east, east]", "[east, west]"),
    ),
    case(
        f"{PLACE} pools.… does not say which devices its nodes have",
        spoil("    devices: 8\n", ""),
        read_file,
        r"write 'device: A100-80' and '(devices: 8)', or name a machine",
        edit("nodes: 4", "nodes: 4\n    {}"),
    ),
    case(
        f"{PLACE} pools.… is spot, and nothing says how often it loses a node",
        spoil("    losses_per_day: 2.4\n", ""),
        read_file,
        r"write '(losses_per_day: 2.4)' \(A100 of GCP in 2022\), or name a machine",
        edit("burst: 2", "burst: 2\n    {}"),
    ),
    case(
        "plan/hardware/devices.py: the limit of … is …, and … has … to …",
        spoil("power_w: 250", "power_w: 350"),
        read_file,
        r"use (\d+) or less, or remove the limit",
        edit("350", "{}"),
    ),
    case(
        "plan/hardware/devices.py: … is no limit of a device",
        begin(cluster="2x8xH100@5kW"),
        read_short,
        r"write for example (\S+), or @70GiB",
        lambda lab, found: lab.settings.update(cluster=f"2x8x{found[1]}"),
    ),
    case(
        f"{PLACE} pools.….across_racks is a link between racks, but there is one rack",
        spoil("zone: east", "zone: east\n    across_racks: ib-hdr"),
        read_file,
        r"give nodes_per_rack below nodes, or remove it",
        edit("across_racks", "nodes_per_rack: 2\n    across_racks"),
    ),
    case(
        f"{PLACE} pools.….burst is …, but there are … nodes",
        spoil("burst: 2", "burst: 3"),
        read_file,
        r"use (\d+) or less",
        edit("burst: 3", "burst: {}"),
    ),
    case(
        f"{PLACE} … does not say how fast it is",
        spoil("gbit_s: 20, ", ""),
        read_file,
        r"give it a type, for example '(type: ib-ndr)', or both gbit_s and latency_us",
        edit("per: node, usd", "{}, per: node, usd"),
    ),
    case(
        f"{OF_FIELDS} unknown key …",
        spoil("burst: 2", "bursts: 2"),
        read_file,
        r"use (\w+)",
        edit("bursts", "{}"),
    ),
    case(
        f"{OF_FIELDS} … is missing",
        spoil("    nodes: 4\n", ""),
        read_file,
        r"write for example '(nodes: 8)'",
        edit("devices: 8", "devices: 8\n    {}"),
    ),
    case(
        f"{OF_FIELDS} … is …, but must be … …",
        spoil("nodes: 4", "nodes: 0"),
        read_file,
        r"use (\d)",
        edit("nodes: 0", "nodes: {}"),
    ),
    case(
        f"{OF_FIELDS} … is …",
        spoil("market: spot", "market: spott"),
        read_file,
        r"use on-demand or (spot)",
        edit("spott", "{}"),
    ),
    case(
        f"{OF_FIELDS} … is …, not …",
        spoil("nodes: 4", "nodes: many"),
        read_file,
        r"write for example '(nodes: 8)'",
        edit("nodes: many", "{}"),
    ),
    case(
        "plan/hardware/this_machine.py: the accelerator … is not in the table of devices",
        begin(),
        look_here,
        r"measure it with: holdfast calibrate",
        calibrate_it,
    ),
    case(
        "plan/hardware/calibration.py: this is no calibration that this version reads",
        write("{}"),
        lambda lab: read_calibration(lab.folder / FILE),
        r"remove the file, or measure again with: holdfast calibrate",
        lambda lab, found: (lab.folder / FILE).unlink(),
    ),
    case(
        "cli/calibrate.py: measuring on … ended early (…)",
        begin_failing,
        measure,
        r"see what this machine lacks with: holdfast doctor",
        lambda lab, found: fake_rank(lab.folder),
    ),
]
