"""Remedies of messages about devices, links and cluster files."""

from __future__ import annotations

from collections.abc import Callable
from re import Match

from holdfast.plan.hardware.devices import device_named, load_devices
from tests.cli.remedies.lab import Case, Lab, case


def begin(**settings: object) -> Callable[[Lab], None]:
    return lambda lab: lab.settings.update(settings)


def take(key: str) -> Callable[[Lab, Match[str]], None]:
    """Use the value that the remedy names."""
    return lambda lab, found: lab.settings.update({key: found[1]})


def find_device(lab: Lab) -> None:
    device_named(lab.settings["device"], load_devices())


def find_peak(lab: Lab) -> None:
    load_devices()["A100-80"].peak(lab.settings["precision"])


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
]
