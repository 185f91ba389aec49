"""What `holdfast calibrate` measured on this machine, and the file that it is kept in.

    {"version": 1, "date": "2026-11-26", "node": "box", "device": "cpu", "torch": "2.13.0", ...}

The file is `$XDG_CACHE_HOME/holdfast/calibrations/NODE.json` (or below `~/.cache`): a home that
several machines share has one for each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.config.sections.run_place import cache_folder
from holdfast.errors import DataError
from holdfast.plan.hardware.devices import DeviceType, Efficiency
from holdfast.plan.hardware.link import Link
from holdfast.plan.hardware.step_costs import NOT_MEASURED, StepCosts

VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """device: a name of `devices.csv`, or what the driver reports. flops: peaks by precision: of
    the table if it has the device, otherwise the best measured rates. bandwidth: likewise. inside:
    what collectives of two devices of this machine see, None if there is one device alone.
    messages: the same of single messages. host: copies between a device and the host's memory.
    cache_bytes, cache_bandwidth: what a kernel may move for its data to be in a cache, and its
    speed. call_s: of an operation that is in no training step, which pays no backward's
    bookkeeping. steps: what steps take beyond that. ways: see `NodePool`."""

    date: str
    node: str
    device: str
    torch: str
    flops: Mapping[str, float]
    bandwidth: float
    efficiency: Mapping[str, Efficiency]
    inside: Link | None = None
    messages: Link | None = None
    host: Link | None = None
    cache_bytes: float = 0.0
    cache_bandwidth: float = 0.0
    call_s: float = 0.0
    samples: tuple[Mapping[str, Any], ...] = field(default=())
    steps: StepCosts = NOT_MEASURED
    ways: tuple[tuple[str, Link], ...] = ()

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

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "date": self.date,
            "node": self.node,
            "device": self.device,
            "torch": self.torch,
            "flops": dict(self.flops),
            "bandwidth": self.bandwidth,
            "efficiency": {name: vars(each) for name, each in self.efficiency.items()},
            "cache_bytes": self.cache_bytes,
            "cache_bandwidth": self.cache_bandwidth,
            "call_s": self.call_s,
            "steps": vars(self.steps),
            "ways": {name: vars(link) for name, link in self.ways},
            **{
                name: vars(link) if link else None
                for name, link in (
                    ("inside", self.inside),
                    ("messages", self.messages),
                    ("host", self.host),
                )
            },
            "samples": [dict(each) for each in self.samples],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """Raises KeyError, TypeError or ValueError for what is none."""
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}")
        inside, messages, host = (
            Link(**data[name]) if data[name] else None for name in ("inside", "messages", "host")
        )
        return cls(
            str(data["date"]),
            str(data["node"]),
            str(data["device"]),
            str(data["torch"]),
            {name: float(rate) for name, rate in data["flops"].items()},
            float(data["bandwidth"]),
            {name: Efficiency(**each) for name, each in data["efficiency"].items()},
            inside,
            messages,
            host,
            float(data["cache_bytes"]),
            float(data["cache_bandwidth"]),
            float(data.get("call_s", 0.0)),
            tuple(data["samples"]),
            StepCosts(**data.get("steps", {})),
            tuple((name, Link(**link)) for name, link in data.get("ways", {}).items()),
        )


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
