"""Prometheus metrics of this node's accelerators: utilisation, memory, power, errors.

The agent answers `/metrics` from memory. So a thread asks the vendor's tool
(`machine/device_readings.py`), and only after a request: a run without a Prometheus starts no
tool. A tool that hangs keeps its thread. The last numbers then go stale, and
`holdfast_device_read_timestamp_seconds` shows it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from holdfast.machine.device_readings import DeviceReading, read_devices

READ_EVERY_S = 10.0
"""Least time between two calls of the tool: each costs some 0.1 s of a processor."""

_GAUGES = (
    ("utilisation_ratio", "utilisation", "Share of the last sample in which a kernel ran"),
    ("memory_used_bytes", "memory_used_bytes", "Memory in use, of all processes"),
    ("memory_total_bytes", "memory_total_bytes", "Memory that the device has"),
    ("power_watts", "power_w", "Power that the device draws"),
    ("temperature_celsius", "temperature_c", "Temperature of the device"),
    (
        "uncorrected_memory_errors",
        "uncorrected_errors",
        "Uncorrected ECC errors since the driver was loaded",
    ),
)


class DeviceMetrics:
    """`render()` gives the newest numbers at once, and has them read again where they are old."""

    def __init__(
        self,
        run_id: str,
        read: Callable[[], Sequence[DeviceReading]] = read_devices,
        *,
        read_every_s: float = READ_EVERY_S,
    ) -> None:
        self._run_id, self._read, self._read_every_s = run_id, read, read_every_s
        self._readings: Sequence[DeviceReading] = ()
        self._read_at: float | None = None  # seconds since the epoch
        self._due = 0.0  # of the monotonic clock
        self._thread: threading.Thread | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """Prometheus text format. The first answer has no devices: their numbers are being read."""
        busy = self._thread is not None and self._thread.is_alive()
        if not busy and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._read_every_s
            self._thread = threading.Thread(target=self._refresh, name="devices", daemon=True)
            self._thread.start()
        return generate_latest(self._registry)

    def _refresh(self) -> None:
        readings = self._read()
        if readings:
            self._readings, self._read_at = readings, time.time()

    def collect(self) -> Iterator[Metric]:
        """The gauges of every device; the registry calls it."""
        if self._read_at is None:
            return
        for title, field, about in _GAUGES:
            gauge = GaugeMetricFamily(
                f"holdfast_device_{title}", about, labels=("run_id", "device", "name")
            )
            for reading in self._readings:
                value = getattr(reading, field)
                if value is not None:
                    gauge.add_metric((self._run_id, reading.index, reading.name), value)
            if gauge.samples:
                yield gauge
        when = GaugeMetricFamily(
            "holdfast_device_read_timestamp_seconds", "When they were read", labels=("run_id",)
        )
        when.add_metric((self._run_id,), self._read_at)
        yield when
