"""Metrics and event files: what a resumed run shows is one continuous curve."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.events import CheckpointFailed, NonFinite
from holdfast.report.ledger.timeledger import TimeLedger
from holdfast.report.live.metrics import RunMetrics
from tests.support.journal_builder import Scribe, lossy_run, started_run


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
