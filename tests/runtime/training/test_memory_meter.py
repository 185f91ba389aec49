"""Samples of a worker's memory: the first step, then a few a minute, and they follow the memory."""

from __future__ import annotations

import torch

from holdfast.training.memory.memory_meter import SAMPLE_INTERVAL_S, MemoryMeter

MIB = 1 << 20


def test_samples_come_seldom_and_follow_the_memory() -> None:
    now = 100.0
    meter = MemoryMeter(torch.device("cpu"), lambda: now)
    first = meter.sample_if_due(3, 1)
    assert first is not None
    assert (first.rank, first.step, first.device_bytes) == (3, 1, 0)
    assert first.bytes > 10 * MIB
    now += SAMPLE_INTERVAL_S / 2
    assert meter.sample_if_due(3, 2) is None
    taken = torch.ones(256 * MIB // 4)
    now += SAMPLE_INTERVAL_S
    later = meter.sample_if_due(3, 3)
    assert later is not None
    assert later.bytes - first.bytes > 200 * MIB
    assert taken.sum() > 0
