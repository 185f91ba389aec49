"""A task whose microbatches take a fixed time, so that the speed of a run is its nodes'."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor, nn

from tests.support.sample_tasks import Gru


class Paced(Gru):
    """pause: seconds that each microbatch takes."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__()
        self.pause = pause

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        time.sleep(self.pause)
        return super().loss(model, batch)
