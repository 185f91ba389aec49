"""What rank 0 says about a generation's settings: how documents are kept apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.events import AttentionChosen, AttentionKernel, Event
from holdfast.layout import Layout, place_layout
from holdfast.model.decoder import Decoder
from holdfast.training.engine.fallbacks import Fallbacks
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.engine.task import DecoderTask
from tests.support.tiny_training import tiny

REASON = "torch has no varlen kernel for a CPU"


WAY = AttentionChosen("blocks", REASON, step=4)
KERNEL = AttentionKernel("flash_attention", "cpu", step=4)


@pytest.mark.parametrize(("attention", "said"), [("document", WAY), ("full", KERNEL)])
def test_the_way_is_decided_and_said_once(attention: str, said: Event) -> None:
    config = tiny(data__attention=attention)
    with torch.device("meta"):
        objective = NextTokenObjective(Decoder(config.model))
    DecoderTask(config).fill_constants(objective, torch.device("cpu"))
    objective.to_empty(device="cpu")
    told: list[Event] = []
    fallbacks = Fallbacks(config, place_layout(Layout(), 1, ("a",)), told.append, objective)
    for step in (4, 5):
        fallbacks.look(step, ((0,),))
    assert told == [said]


def test_of_another_model_nothing_is_said() -> None:
    config, told = tiny(data__attention="document"), list[Event]()
    topology = place_layout(Layout(), 1, ("a",))
    Fallbacks(config, topology, told.append, nn.Linear(2, 2)).look(1, ((0,),))
    assert not told
