"""Metrics and event files: what a resumed run shows is one continuous curve."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.events import CheckpointFailed, NonFinite, SparesChanged, WorkerPaced
from holdfast.machine.device_readings import DeviceReading, read_devices
from holdfast.report.ledger.timeledger import TimeLedger
from holdfast.report.live.catalogue import CATALOGUE
from holdfast.report.live.metrics import DeviceMetrics, RunFacts, RunMetrics
from tests.support.journal_builder import Scribe, lossy_run, started_run
from tests.support.ranks import wait_until


def scraped(metrics: RunMetrics) -> dict[str, float]:
    """Every sample by name and labels, without the run's."""
    out: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["run_id"] == "demo"
            labels = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "run_id"]
            out[",".join([sample.name, *labels])] = sample.value
    return out


def metrics_of(run: Scribe, **options: Any) -> dict[str, float]:
    metrics = RunMetrics("demo", {"model": "tiny"}, **options)
    for record in run.records:
        metrics.observe(record)
    return scraped(metrics)


def test_a_lossy_run_counts_each_token_once_and_names_the_rest() -> None:
    found = metrics_of(lossy_run())
    assert found["holdfast_tokens_total,kind=unique"] == 30 * 1024
    assert found["holdfast_tokens_total,kind=replayed"] == 3 * 1024
    assert found["holdfast_step"] == 30
    assert found["holdfast_generation"] == 3
    assert found["holdfast_world_size"] == 2
    assert found["holdfast_membership_changes_total,reason=worker_lost"] == 1
    assert found["holdfast_checkpoints_total,result=ok,tier=2"] == 4
    assert found["holdfast_run_info,model=tiny"] == 1
    assert found["holdfast_recovery_duration_seconds_sum,phase=restore"] == pytest.approx(1.0)


def test_the_classes_of_time_add_up_and_phases_add_up_to_the_steps() -> None:
    run, ledger = lossy_run(), TimeLedger()
    for record in run.records:
        ledger.observe(record)
    found = metrics_of(run)
    classes = [v for k, v in found.items() if k.startswith("holdfast_goodput_seconds,")]
    assert sum(classes) == pytest.approx(ledger.wall)
    assert found["holdfast_goodput_ratio,window=run"] == pytest.approx(ledger.goodput)
    phases = [v for k, v in found.items() if k.startswith("holdfast_step_duration_seconds_sum")]
    assert sum(phases) == pytest.approx(33 * 1.0 + 4 * 0.125)


def test_work_at_risk_is_what_a_loss_of_everything_would_cost() -> None:
    run = started_run(7)
    run.commit(5)
    assert metrics_of(run)["holdfast_work_at_risk_seconds"] == pytest.approx(2.0)
    run.lose(0)
    run.restart(5)
    assert metrics_of(run)["holdfast_work_at_risk_seconds"] == pytest.approx(0.0)


def test_failures_are_counted_and_utilisation_needs_a_peak() -> None:
    run = lossy_run()
    run.write(CheckpointFailed("full", step=30))
    run.write(NonFinite(0, "embed.weight", step=31))
    found = metrics_of(run)
    assert found["holdfast_checkpoints_total,result=failed,tier=2"] == 1
    assert found["holdfast_nonfinite_steps_total"] == 1
    assert not [name for name in found if "mfu" in name]
    flops = {"full": 1e6, "causal": 5e5}
    found = metrics_of(run, flops_per_token=flops, peak_flops=1e12)
    speed = found["holdfast_tokens_per_second"]
    assert found["holdfast_mfu_ratio,convention=full"] == pytest.approx(speed * 1e-6)
    assert found["holdfast_mfu_ratio,convention=causal"] == pytest.approx(speed * 5e-7)


def events_in(path: Path) -> list[Any]:
    """The events of one file, read with another project's messages and checksum."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    data, at, out = path.read_bytes(), 0, []
    while at < len(data):
        (length, length_sum) = struct.unpack_from("<QI", data, at)
        payload = data[at + 12 : at + 12 + length]
        (payload_sum,) = struct.unpack_from("<I", data, at + 12 + length)
        assert length_sum == masked(data[at : at + 8])
        assert payload_sum == masked(payload)
        out.append(Event.FromString(payload))
        at += 16 + length
    assert out[0].file_version == "brain.Event:2"
    return out


def as_tensorboard_shows(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Replays the files by name; a start mark forgets every step from its own on."""
    from tensorboardX.proto.event_pb2 import SessionLog

    shown: list[tuple[int, float]] = []
    for path in sorted(folder.iterdir()):
        for event in events_in(path):
            if event.session_log.status == SessionLog.START:
                shown = [pair for pair in shown if pair[0] < event.step]
            for value in event.summary.value:
                if value.tag == tag:
                    shown.append((event.step, value.simple_value))
    return shown


def test_the_whole_room_is_free_of_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, holdfast.report as room\n"
        "for m in pkgutil.iter_modules(room.__path__):"
        " importlib.import_module(f'holdfast.report.{m.name}')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- numbers of accelerators, as the vendors' tools print them, in `/metrics` ---------------------
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


def test_requeues_costs_and_recoveries_are_counted() -> None:
    facts = RunFacts(steps=40, workers=2, epoch_samples=60)
    run = lossy_run(price={"usd_per_hour": 36.0})
    found = metrics_of(run, facts=facts)
    assert found["holdfast_requeues_total"] == 1
    assert found["holdfast_recoveries_total,result=ok"] == 1
    assert found["holdfast_recoveries_total,result=failed"] == 0
    assert found["holdfast_worker_losses_total,noticed_by=exit"] == 1
    assert found["holdfast_run_state,state=finished"] == 1
    assert found["holdfast_target_steps"] == 40
    ledger = TimeLedger()
    for record in run.records:
        ledger.observe(record)
    costs = [v for k, v in found.items() if k.startswith("holdfast_cost_usd,")]
    assert sum(costs) == pytest.approx(0.01 * ledger.running)
    assert found["holdfast_cost_usd,class=stopped"] == 0


def test_a_recovery_that_breaks_before_a_step_has_failed() -> None:
    run = started_run(5)
    for _ in range(3):
        run.lose(0)
        run.restart(5)
    assert metrics_of(run)["holdfast_recoveries_total,result=failed"] == 2


def test_the_catalogue_names_everything_that_is_shown() -> None:
    names = {name for spec in CATALOGUE.values() for name in spec.sample_names}
    shown = {name.partition(",")[0] for name in metrics_of(lossy_run())}
    assert {name for name in shown if not name.endswith("_created")} <= names


def test_a_slow_worker_counts_until_it_is_well_or_lost() -> None:
    def paced(node: str, pid: int, pace: str) -> WorkerPaced:
        return WorkerPaced(node, pid, pace, 3.0, "slower than the rest", step=10)

    run = started_run(10)
    run.write(paced("a", 7, "slow"))
    run.write(paced("b", 8, "standby"))
    run.restart(10, reason="slow_worker")
    assert metrics_of(run)["holdfast_slow_workers"] == 2, "a generation begins for it"
    run.write(paced("a", 7, "well"))
    assert metrics_of(run)["holdfast_slow_workers"] == 1
    run.write(SparesChanged([]))
    assert metrics_of(run)["holdfast_slow_workers"] == 0, "the node that waited has left"
