"""What `holdfast calibrate` measured on this machine, and the file that it is kept in.

    {"version": 1, "date": "2026-11-26", "node": "box", "device": "cpu", "torch": "2.13.0", ...}

The file is `$XDG_CACHE_HOME/holdfast/calibrations/NODE.json` (or below `~/.cache`): a home that
several machines share has one for each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from holdfast.config.sections.run_place import cache_folder
from holdfast.core.json_parsing import JsonMessage, JsonObject, ParsedJson
from holdfast.errors import DataError
from holdfast.plan.hardware.devices import NOT_MEASURED, DeviceType, Efficiency, StepCosts
from holdfast.plan.hardware.link import Link

VERSION = 1


@dataclass(frozen=True)
class Calibration(JsonMessage):
    """What was measured. Peaks are those of the table if it has the device."""

    date: str
    node: str
    device: str  # a name of `devices.csv`, or what the driver reports
    torch: str
    flops: Mapping[str, float]  # peaks by precision, or the best measured rates
    bandwidth: float  # likewise, bytes a second
    efficiency: Mapping[str, Efficiency]
    inside: Link | None = None  # what collectives of two devices here see; None: there is one alone
    messages: Link | None = None  # the same of single messages
    host: Link | None = None  # copies between a device and the host's memory
    cache_bytes: float = 0.0  # what a kernel may move for its data to be in a cache
    cache_bandwidth: float = 0.0  # its speed
    call_s: float = 0.0  # of an operation outside of training, without a backward's bookkeeping
    samples: tuple[Mapping[str, Any], ...] = ()
    steps: StepCosts = NOT_MEASURED  # what steps take beyond that
    ways: tuple[tuple[str, Link], ...] = ()  # see `NodePool`

    @property
    def summary(self) -> str:
        """One sentence about the source of a plan's numbers."""
        precisions = ", ".join(self.efficiency)
        return (
            f"{self.device}: measured on {self.date} ({precisions}, torch {self.torch}); "
            "holdfast calibrate measures again"
        )

    def applied_to(self, device: DeviceType) -> DeviceType:
        """The device with the measured numbers in place of the table's."""
        return replace(
            device,
            flops={**device.flops, **self.flops},
            bandwidth=self.bandwidth,
            host_bytes_s=self.host.bandwidth if self.host else device.host_bytes_s,
            efficiency={**device.efficiency, **self.efficiency},
            measured=self.date,
            steps=self.steps,
        )

    def to_json(self) -> JsonObject:
        ways = {name: link.to_json() for name, link in self.ways}
        return super().to_json() | {"version": VERSION, "ways": ways}

    @classmethod
    def from_json(cls, value: ParsedJson) -> Self:
        """Raises KeyError, TypeError or ValueError for what is none."""
        if value["version"] != VERSION:
            raise ValueError(f"version {value['version']}")
        return super().from_json({**value, "ways": value.get("ways", {}).items()})


def calibration_path(node: str) -> Path:
    """The file of a machine's calibration."""
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in node)
    return Path(cache_folder()) / "holdfast" / "calibrations" / f"{name}.json"


def read_calibration(path: Path) -> Calibration | None:
    """None if there is none. Raises DataError for a file that is none."""
    try:
        return Calibration.from_json(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DataError(
            "this is no calibration that this version reads",
            where=str(path),
            remedy="remove the file, or measure again with: holdfast calibrate",
        ) from None


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Replace the file at once: a reader finds the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(json.dumps(calibration.to_json(), indent=1) + "\n", "utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
