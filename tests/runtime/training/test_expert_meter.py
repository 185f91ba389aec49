"""When a rank reports the choices of its routers."""

from __future__ import annotations

from torch import nn

from holdfast.layout import Coordinate
from holdfast.model.decoder import Decoder
from holdfast.training.memory.expert_meter import ExpertMeter
from tests.support.models import config, lively, tokens

EXPERTS = {"count": 4, "top_k": 2}


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
