"""The own loop that `benchmarks.runtime.own_loop_kill` breaks: 0.79 M parameters, a wait in each
batch."""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn

import holdfast


class Ones:
    version = "ones"

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(256)}


ones = Ones()
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
run = holdfast.run()
run.keep(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
for step in run.steps(100_000, batch_size=96, microbatch_size=8):
    for batch in step.batches(ones):
        time.sleep(float(sys.argv[1]))
        step.backward(model(batch["x"]).square().sum(), weight=8)
    step.apply()
