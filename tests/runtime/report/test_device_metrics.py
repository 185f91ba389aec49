"""Numbers of accelerators, as the vendors' tools print them, in `/metrics`."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.machine.device_readings import DeviceReading, read_devices
from holdfast.report.live.metrics import DeviceMetrics
from tests.support.ranks import wait_until

NVIDIA = """\
index, name, utilization.gpu [%], memory.used [MiB], memory.total [MiB], power.draw [W], \
temperature.gpu, ecc.errors.uncorrected.volatile.total
0, NVIDIA H100 80GB HBM3, 97, 71234, 81559, 655.31, 61, 0
1, NVIDIA GeForce RTX 4090, 0, 1, 24564, [N/A], 34, [N/A]
"""
ROCM = """\

device,Temperature (Sensor junction) (C),Current Socket Graphics Package Power (W),GPU use (%),\
VRAM Total Memory (B),VRAM Total Used Memory (B),Card Series
card0,35.0,133.0,50,206141652992,297013248,AMD Instinct MI300X

"""
INTEL = """\
index, name, utilization.gpu [%], memory.used [MiB], memory.total [MiB], power.draw [W], \
temperature.gpu [C]
0, Intel(R) Arc(TM) Pro B60, 12, 100, 24480, 45.5, 50
"""


def _tool(folder: Path, name: str, text: str, wants: str) -> None:
    """A command that prints `text`, and fails as the real ones do if it is asked otherwise."""
    script = f"""#!/bin/sh
case "$*" in *"{wants}"*) ;; *) echo "not a valid argument" >&2; exit 2;; esac
cat <<'END'
{text.rstrip(chr(10))}
END
"""
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_nvidia_devices_with_what_a_driver_does_not_tell(tools: Path) -> None:
    _tool(tools, "nvidia-smi", NVIDIA, "--query-gpu=index,name,utilization.gpu,memory.used")
    assert read_devices() == [
        DeviceReading(
            index="0",
            name="NVIDIA H100 80GB HBM3",
            utilisation=0.97,
            memory_used_bytes=71234 * 2**20,
            memory_total_bytes=81559 * 2**20,
            power_w=655.31,
            temperature_c=61.0,
            uncorrected_errors=0.0,
        ),
        DeviceReading(
            index="1",
            name="NVIDIA GeForce RTX 4090",
            utilisation=0.0,
            memory_used_bytes=2.0**20,
            memory_total_bytes=24564 * 2**20,
            power_w=None,
            temperature_c=34.0,
            uncorrected_errors=None,
        ),
    ]


def test_other_vendors(tools: Path) -> None:
    _tool(tools, "rocm-smi", ROCM, "--showmeminfo vram")
    (found,) = read_devices()
    assert (found.index, found.name) == ("0", "AMD Instinct MI300X")
    assert (found.utilisation, found.power_w, found.temperature_c) == (0.5, 133.0, 35.0)
    assert (found.memory_used_bytes, found.memory_total_bytes) == (297013248, 206141652992)
    assert found.uncorrected_errors is None

    (tools / "rocm-smi").unlink()
    _tool(tools, "xpu-smi", INTEL, "--query-gpu=index")
    (found,) = read_devices()
    assert (found.name, found.utilisation) == ("Intel(R) Arc(TM) Pro B60", 0.12)


def test_no_tool_and_one_that_fails_or_hangs_is_no_device(tools: Path) -> None:
    assert read_devices() == []
    _tool(tools, "nvidia-smi", NVIDIA, "--an-older-driver")
    assert read_devices() == []
    (tools / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 1000\n")
    assert read_devices(timeout_s=0.2) == []


def _samples(text: bytes) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(text.decode())
    return {(s.name, s.labels.get("device", "")): s.value for f in families for s in f.samples}


def test_a_request_never_waits_for_the_tool() -> None:
    release, asked = threading.Event(), []

    def read() -> list[DeviceReading]:
        asked.append(1)
        assert release.wait(120)
        return [DeviceReading("3", "a device", utilisation=0.25)]

    metrics = DeviceMetrics("demo", read, read_every_s=0.0)
    assert _samples(metrics.render()) == _samples(metrics.render()) == {}
    assert len(asked) == 1, "one tool at a time"
    release.set()
    key = ("holdfast_device_utilisation_ratio", "3")
    wait_until(lambda: key in _samples(metrics.render()))
    found = _samples(metrics.render())
    assert found[key] == 0.25
    assert found["holdfast_device_read_timestamp_seconds", ""] > 1e9
    assert ("holdfast_device_power_watts", "3") not in found


def test_what_was_read_is_kept_until_it_is_old() -> None:
    asked = []

    def read() -> list[DeviceReading]:
        asked.append(1)
        return [DeviceReading("0", "a device", power_w=10.0 * len(asked))]

    metrics = DeviceMetrics("demo", read, read_every_s=1000.0)
    key = ("holdfast_device_power_watts", "0")
    wait_until(lambda: key in _samples(metrics.render()))
    for _ in range(3):
        assert _samples(metrics.render())[key] == 10.0
    assert len(asked) == 1
