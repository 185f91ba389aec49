"""Samples of a worker's memory and of its routers: when they come, and what they count."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.layout import Coordinate
from holdfast.model.decoder import Decoder
from holdfast.training.memory.meters import SAMPLE_INTERVAL_S, ExpertMeter, MemoryMeter
from tests.support.models import config, lively, tokens

MIB = 1 << 20
EXPERTS = {"count": 4, "top_k": 2}


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


class _Objective(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder


def test_a_generation_that_pauses_loses_no_choice() -> None:
    decoder = lively(config(family="mixtral", experts=EXPERTS))
    meter = ExpertMeter(_Objective(decoder), Coordinate(0, 0, 0, 0, 0, 0), 9, lambda: 5.0)
    found = []
    for step, is_pausing in ((1, False), (2, False), (3, True), (4, False), (9, False)):
        decoder(tokens(2, 5)).sum().backward()
        routed = meter.sample_if_due(0, step, is_pausing=is_pausing)
        found.append(sum(routed.counts["0"]) // (2 * 2 * 5) if routed else 0)
    assert found == [1, 0, 2, 0, 2]
