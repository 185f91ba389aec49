import torch
import torch.nn.functional as F
from points import Points
from torch import nn

import holdfast

STEPS, BATCH, MICROBATCH = 300, 64, 16

dataset = Points()
model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
run = holdfast.run()
run.keep(model, optimizer, scheduler, clip_norm=1.0)
for step in run.steps(STEPS, batch_size=BATCH, microbatch_size=MICROBATCH):
    for batch in step.batches(dataset):
        loss = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        step.backward(loss, weight=len(batch["y"]))
    step.apply()
